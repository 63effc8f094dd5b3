"""Times of instructions in steps of a compiled model: recorded on every kind of ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompile
from tests import scripts
from tests.inspect.test_step_trace import check_both
from tests.inspect.trace_format import read_trace
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.model import CompiledModel

pytestmark = pytest.mark.usefixtures("captured_once", "forked_launchers")

IDS = torch.tensor([[5, 9, 2, 7], [8, 8, 4, 6]])


def _compiled(backend: str = "native", **options: Any) -> CompiledModel:
    settings = {"max_seq_len": 64, **options}
    return tpcompile.compile("preset:tiny-qwen3", backend=backend, random_weights=0, **settings)


def _events(model: CompiledModel) -> list[dict[str, Any]]:
    file = io.StringIO()
    model.trace().write(file)
    return read_trace(file.getvalue())


@pytest.mark.parametrize(("tp", "simulate"), [(1, False), (2, True), (2, False)])
def test_the_last_step_of_generate(tp: int, simulate: bool) -> None:
    with _compiled(tp=tp, simulate=simulate) as model, _compiled("torch") as plain:
        model.time_steps()
        tokens = model.generate(IDS, max_new_tokens=7, do_sample=False)
        assert torch.equal(tokens, plain.generate(IDS, max_new_tokens=7, do_sample=False))
        trace = model.trace()
        assert trace.program.ranks == tp
        assert trace.title == f"tiny-qwen3, tp={tp}, batch 2, 10 tokens, on cpu"
        check_both(_events(model), len(trace.program.instructions), tp)
        assert {kind.kind for kind in trace.kinds} >= {"partial_attention", "argmax"}


def test_steps_are_timed_only_on_request() -> None:
    with _compiled() as model:
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        with pytest.raises(UsageError, match="No step was timed"):
            model.trace()
        model.time_steps()
        model.generate(IDS[:1], max_new_tokens=3, do_sample=False)
        first = model.trace()
        assert first.measured.program is model.program.program
        model.time_steps(False)
        model.generate(IDS[:1], max_new_tokens=3, do_sample=False)
        assert model.trace().measured.last == first.measured.last


def test_a_longer_context_is_predicted_to_take_longer() -> None:
    with _compiled() as model:
        model.time_steps()
        past = model.new_cache()
        model(IDS[:1].repeat(1, 15), past_key_values=past)
        model(IDS[:1, :1], past_key_values=past)
        long = model.trace()
        model.generate(IDS[:1, :2], max_new_tokens=2, do_sample=False)
        short = model.trace()
    assert "61 tokens" in long.title and "3 tokens" in short.title
    assert long.simulated.makespan > short.simulated.makespan


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_other_backends_record_no_times(backend: str) -> None:
    with _compiled(backend) as model:
        for call in (model.time_steps, model.trace):
            with pytest.raises(UnsupportedError, match=r'backend="native"'):
                call()


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, tpcompile\n"
        "with tpcompile.compile('preset:tiny-qwen3', backend='native', random_weights=0,\n"
        "                       max_seq_len=64) as model:\n"
        "    model.time_steps()\n"
        "    model.generate(torch.tensor([[5, 9]]), max_new_tokens=3, do_sample=False)\n"
        "    trace = model.trace()\n"
        "    assert len(trace.measured.last.begins) == len(trace.program.instructions)\n"
        "    sys.stdout.write(f'ranks {trace.program.ranks}' + chr(10))\n"
    )
    ran = scripts.run([str(script)], ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ranks 2") == 2
