"""Conversion for OpenVINO: `python -m benchmarks.peers.openvino_export DIRECTORY OUT [INTEGERS]`.

optimum-intel supports older versions of transformers than the benchmarks, so this runs in a
process of its own, with an interpreter that may have nothing else.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

FORMATS = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": True, "group_size": 64, "ratio": 1.0},
}
"""Integers with a scale per row, or per group of 64 columns of the linears of layers."""

if __name__ == "__main__":
    source, out, *integers = sys.argv[1:]
    options = {"load_in_8bit": False}
    if integers:
        options = {"quantization_config": OVWeightQuantizationConfig(**FORMATS[integers[0]])}
    exported = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **options)
    exported.save_pretrained(out)
