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
"""The number of sequences that share a load of a tile: as few as a matrix instruction has, or
many."""
SPINS = 1 << 24
"""The maximum polls of a counter before a timeout: about ten seconds on a GPU."""
LEAST_CAPABILITY = (8, 0)
"""The least compute capability: asynchronous copies and bf16."""
