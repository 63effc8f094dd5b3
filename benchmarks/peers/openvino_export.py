"""Conversion for OpenVINO: `python -m benchmarks.peers.openvino_export DIRECTORY OUT`.

optimum-intel supports older versions of transformers than the benchmarks, so this runs in a
process of its own, with an interpreter that may have nothing else.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM

if __name__ == "__main__":
    source, out = sys.argv[1:]
    exported = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False
    )
    exported.save_pretrained(out)
