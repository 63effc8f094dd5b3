"""Guesses under torchrun: the first process guesses, and all compute the rows."""

from __future__ import annotations

from pathlib import Path

from tests import scripts

_SCRIPT = """
import tpcompile
from tpcompile import SamplingParams

REQUESTS = (
    ([5, 6, 7, 8] * 4, SamplingParams(max_tokens=40, logprobs=1)),
    ([9, 8, 7], SamplingParams(max_tokens=30, temperature=0.9, seed=3)),
)
with tpcompile.compile("preset:tiny-qwen3", random_weights=3, max_seq_len=96) as model:
    sides = (None, "prompt:4")
    if not model.leads:
        for _ in sides:
            model.follow()
    else:
        answers = []
        for speculate in sides:
            with tpcompile.Engine(model, speculate=speculate) as engine:
                handles = [engine.add(*each) for each in REQUESTS]
                answers.append([[one.chosen for one in each.result()] for each in handles])
        print(answers[0] == answers[1], model.steps.drafted >= model.steps.accepted > 0)
"""


def test_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ran = scripts.run([str(script)], ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "True"]
