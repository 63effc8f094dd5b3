"""The names of dtypes, without torch: the command line checks them before torch is imported."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The short names of dtypes."""
AUTO_DTYPE = "auto"
"""The name that leaves the choice to the configuration."""
