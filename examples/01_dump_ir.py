"""Print statistics of each pass, then one layer of the graph, whole and as one rank sees it.

python examples/01_dump_ir.py [MODEL] [TP]
"""

import sys

import tpcompile
from tpcompile.passes import default_pipeline, run_passes


def main(model: str = "preset:tiny-qwen3", tp: str = "2") -> None:
    _, stages = run_passes(tpcompile.capture(model), default_pipeline(int(tp)))

    print(f"{'stage':20} {'ms':>7} {'matches':>8} {'nodes':>6}")
    for stage in stages:
        stats = stage.stats
        print(f"{stage.name:20} {stats.ms:7.2f} {stats.matches:8} {stats.nodes_after:6}")

    by_name = {stage.name: stage for stage in stages}
    print("\nLayer 0 after kv-heads: each rank holds the heads that it needs\n")
    print(layer(by_name["kv-heads"].text(), 0))
    print("\nThe same layer after the last pass, as rank 1 sees it\n")
    print(layer(stages[-1].text(rank=1), 0))


def layer(text: str, number: int) -> str:
    """Return the lines of one layer of a dump."""
    _, _, rest = text.partition(f"\nlayer {number}\n")
    lines = rest.split("\n")
    count = next(i for i, line in enumerate(lines) if not line.startswith("  "))
    return "\n".join(lines[:count])


if __name__ == "__main__":
    main(*sys.argv[1:])
