"""The options with which kernels are compiled and launched."""

from __future__ import annotations

WARPS = 8
"""The warps of a worker. One worker runs on an SM, so each thread may have 255 registers."""
COMPILED = {"num_warps": WARPS, "enable_fp_fusion": True}
LAUNCHED = COMPILED | {"launch_cooperative_grid": True}
"""The driver refuses a cooperative launch unless all workers can run at the same time."""
STEP = 16
"""The columns of a matrix instruction."""
LEAST_SEQUENCES, MOST_SEQUENCES = 8, 64
"""The sequences that share the reading of a tile, few or many: few are those of a matrix
instruction."""
SPINS = 1 << 24
"""The looks at a counter after which a worker gives up: about ten seconds on a GPU."""
LEAST_CAPABILITY = (8, 0)
"""The least compute capability: asynchronous copies and bf16."""
