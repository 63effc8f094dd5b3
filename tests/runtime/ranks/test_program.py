"""Decode steps on the reference machine agree with the same model's modules."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tpcompile
from tests import scripts
from tests.models import TOLERANCE, relative_error
from tpcompile.backends.executor import EXECUTORS
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.parts import parts_of
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.step import Step
from tpcompile.vm.program.text import parse_program

pytestmark = pytest.mark.usefixtures("forked_launchers")

IDS = torch.tensor([[5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 2, 9]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def _compiled(backend: str, model: str = "preset:tiny-qwen3", **options: Any) -> CompiledModel:
    settings = {"simulate": True, "max_seq_len": 64, **options}
    return tpcompile.compile(model, backend=backend, random_weights=0, **settings)


@pytest.mark.parametrize("pipeline", [None, "standard{block=4,interleaved=true}"])
@pytest.mark.parametrize(("model", "tp"), [("preset:tiny-qwen2", 3), ("preset:tiny-qwen3", 2)])
def test_generates_as_modules_do(model: str, tp: int, pipeline: str | None) -> None:
    """Greedy, sampled and beam-searched tokens of padded rows are equal."""
    options = {"tp": tp, "pipeline": pipeline}
    with (
        _compiled("reference", model, **options) as machine,
        _compiled("torch", model, **options) as modules,
    ):
        for how in ({}, {"do_sample": True, "temperature": 2.0}, {"num_beams": 3}):
            texts = []
            for compiled in (machine, modules):
                torch.manual_seed(0)
                texts.append(compiled.generate(IDS, attention_mask=MASK, max_new_tokens=9, **how))
            assert torch.equal(*texts), how


def test_logits_of_a_step() -> None:
    """Steps of one token run on the machine, prompts on the modules, with one cache."""
    with _compiled("reference", tp=2) as machine, _compiled("torch", tp=2) as modules:
        logits = []
        for compiled in (machine, modules):
            past = compiled(IDS[:, :4], use_cache=True).past_key_values
            first = compiled(IDS[:, 4:5], past_key_values=past, use_cache=True).logits
            second = compiled(IDS[:, 5:], past_key_values=past, use_cache=True).logits
            again = compiled(IDS[:, :2], past_key_values=past, use_cache=True).logits
            logits.append((first, second, again))
        for ours, theirs in zip(*logits, strict=True):
            assert float((ours - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())


def test_program() -> None:
    with _compiled("reference", tp=2, max_batch=3) as model:
        program = model.program
        assert program is model.program
        summary = program.schedule.to_json()
        assert summary["verified"] and summary["tp"] == 2
        assert summary["batch"] == 3
        assert parse_program(program.text()) == program.program


@pytest.mark.parametrize(("tp", "model"), [(2, "preset:tiny-qwen3"), (3, "preset:tiny-qwen2")])
def test_ranks_that_are_processes_give_the_same_bits(tp: int, model: str) -> None:
    """Ranks in processes give the same tokens and logits while caches and batches change."""
    outputs = []
    for simulate in (True, False):
        with _compiled("reference", model, tp=tp, simulate=simulate) as ranks:
            texts = ranks.generate(IDS, attention_mask=MASK, max_new_tokens=20)
            past = ranks(IDS[:, :5], use_cache=True).past_key_values
            logits = ranks(IDS[:, 5:], past_key_values=past, use_cache=True).logits
            past.batch_select_indices(torch.tensor([1, 0, 1]))
            three = ranks(IDS[:1, :1].repeat(3, 1), past_key_values=past, use_cache=True).logits
            assert ranks.steps[:2] == (21, 2)
            outputs.append((texts, logits, three))
    assert all(map(torch.equal, *outputs))


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much is missing, and a later call finds the model as it was."""

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _compiled("reference", tp=2, simulate=False) as model:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(UnsupportedError, match=r"cannot be allocated.* bytes: No space"):
                model.generate(IDS, max_new_tokens=3)
        assert model.generate(IDS, max_new_tokens=3).shape == (2, 9)


_JOINED = """
import sys, torch, tpcompile
with tpcompile.compile("preset:tiny-qwen3", tp=2, backend="reference", random_weights=0,
                       max_seq_len=64) as model:
    ids = torch.tensor({ids})
    past = model(ids, use_cache=True).past_key_values
    logits = model(ids[:, :1], past_key_values=past, use_cache=True).logits
    outputs = model.generate(ids, max_new_tokens=12), logits
    ran = model.steps[:2]
sys.stdout.write(f"{{ran}} {{all(map(torch.equal, outputs, torch.load({wanted!r})))}}" + chr(10))
"""


def test_joined_ranks_give_the_same_bits(tmp_path: Path) -> None:
    """Under a launcher each process runs its part, with the bits of simulated ranks."""
    ids, wanted, script = IDS[:, :4], tmp_path / "wanted.pt", tmp_path / "script.py"
    with _compiled("reference", tp=2) as model:
        past = model(ids, use_cache=True).past_key_values
        logits = model(ids[:, :1], past_key_values=past, use_cache=True).logits
        torch.save((model.generate(ids, max_new_tokens=12), logits), wanted)
    script.write_text(_JOINED.format(ids=ids.tolist(), wanted=str(wanted)))
    done = scripts.run([str(script)], ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(12, 2) True"] * 2


def test_a_smaller_batch_runs_in_the_next_larger_program() -> None:
    """Empty rows of the larger program write no keys and values, and are not in the result."""
    ids = torch.arange(27).view(9, 3) * 5 % 199
    with _compiled("reference", tp=2) as machine, _compiled("torch", tp=2) as modules:
        outputs = []
        for compiled in (machine, modules):
            past = compiled(ids, use_cache=True).past_key_values
            for _ in range(3):
                logits = compiled(ids[:, :1], past_key_values=past, use_cache=True).logits
            outputs.append(logits)
        assert outputs[0].shape == outputs[1].shape
        assert relative_error(*outputs) < TOLERANCE
        assert list(machine._programs._by_size) == [(1, 1), (10, 1)]  # type: ignore[union-attr]


LATE_ENDS = torch.tensor([[456, 399, 478, 776, 756, 468], [669, 263, 109, 133, 619, 578]])
"""Prompts whose sixth and ninth new tokens do not occur before."""


@pytest.mark.parametrize("simulate", [True, False])
def test_generate_launches_several_steps(
    monkeypatch: pytest.MonkeyPatch, *, simulate: bool
) -> None:
    """A launch ends with its last sequence; sequences that end earlier do not continue."""
    with _compiled("torch", tp=2) as modules:
        plain = modules.generate(LATE_ENDS, max_new_tokens=20)
        ends = [plain[0, 6 + 5].item(), plain[1, 6 + 8].item()]
        stopping = {"eos_token_id": ends, "pad_token_id": 1, "max_new_tokens": 20}
        stopped = modules.generate(LATE_ENDS, **stopping)
    assert stopped.shape == (2, 6 + 9)
    with _compiled("reference", tp=2, simulate=simulate) as model:
        launched = _launches(model, monkeypatch)
        assert torch.equal(model.generate(LATE_ENDS, max_new_tokens=20), plain)
        assert launched == [19] and model.steps[:2] == (19, 1)
        assert torch.equal(model.generate(LATE_ENDS, **stopping), stopped)
        assert model.steps[:2] == (19 + 8, 2)
        monkeypatch.setattr(model._ranks, "most_steps", lambda stops: 3)
        assert torch.equal(model.generate(LATE_ENDS, **stopping), stopped)
        assert launched[2:] == [3, 3, 3] and model.steps[:2] == (19 + 8 + 8, 3)


class _Streamer(BaseStreamer):
    """A streamer that records tokens, and raises at the token `breaks_at`."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.seen: list[list[int]] = []
        self._breaks_at = breaks_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.seen) == self._breaks_at:
            raise ValueError("the reader has left")
        self.seen.append(value.tolist())

    def end(self) -> None: ...


@pytest.mark.parametrize("simulate", [True, False])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_streamer_gets_tokens_inside_a_launch(
    monkeypatch: pytest.MonkeyPatch, backend: str, *, simulate: bool
) -> None:
    with _compiled(backend, tp=2, simulate=simulate) as model:
        launched = _launches(model, monkeypatch)
        plain = model.generate(LATE_ENDS, max_new_tokens=20)
        streamer = _Streamer()
        ends = {"eos_token_id": plain[0, 6 + 5].item(), "pad_token_id": 1}
        tokens = model.generate(LATE_ENDS, max_new_tokens=20, streamer=streamer, **ends)
        assert launched == [19, 19], "tokens are streamed without single steps"
        assert streamer.seen == [LATE_ENDS.tolist(), *tokens[:, 6:].t().tolist()]


@pytest.mark.parametrize("simulate", [True, False])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_streamer_that_raises(backend: str, *, simulate: bool) -> None:
    """Its error reaches the caller, and the model can be used again."""
    with _compiled(backend, tp=2, simulate=simulate) as model:
        plain = model.generate(LATE_ENDS[:1], max_new_tokens=20)
        streamer = _Streamer(breaks_at=4)
        with pytest.raises(ValueError, match="the reader has left"):
            model.generate(LATE_ENDS[:1], max_new_tokens=20, streamer=streamer)
        assert streamer.seen[1:] == plain[0, 6:9, None].tolist()
        assert torch.equal(model.generate(LATE_ENDS[:1], max_new_tokens=20), plain)


class _Watching(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


WATCHED: dict[str, Callable[[CompiledModel], dict[str, Any]]] = {
    "a stopping criterion": lambda model: {"stopping_criteria": [_Watching()]},
    "a cache of the caller": lambda model: {"past_key_values": model.new_cache()},
    "a cache in the result": lambda model: {"return_dict_in_generate": True},
    "many stop tokens": lambda model: {"eos_token_id": list(range(900, 909))},
}


@pytest.mark.parametrize("watcher", WATCHED)
def test_one_step_at_a_time_if_something_looks_at_each(
    watcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _compiled("reference") as model:
        launched = _launches(model, monkeypatch)
        options = WATCHED[watcher](model)
        model.generate(IDS[:1], max_new_tokens=5, min_new_tokens=None, **options)
        assert launched == [1] * 4
        if "past_key_values" in options:
            assert options["past_key_values"].lengths == (6 + 4,)


def test_torch_sleeps_while_a_step_runs_after_work_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a prompt, and after logits, which the caller works on; not between tokens."""
    waits = []

    def during(wait: Callable[[], Any]) -> Any:
        waits.append(wait)
        return wait()

    with _compiled("native", tp=2) as model:
        monkeypatch.setattr(EXECUTORS["native"], "during", during)
        model.generate(IDS, max_new_tokens=5, stopping_criteria=[_Watching()])
        assert len(waits) == 1
        model.generate(IDS, max_new_tokens=5, do_sample=True)
        assert len(waits) == 5


def test_a_launch_needs_room_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that exceeds the cache is refused as with modules."""
    with _compiled("reference", max_seq_len=12) as model:
        launched = _launches(model, monkeypatch)
        assert model.generate(IDS, max_new_tokens=7).shape == (2, 13)
        assert launched == [6]
        with pytest.raises(UsageError, match="max_seq_len=12"):
            model.generate(IDS, max_new_tokens=8)


def test_a_launch_needs_room_for_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions may exceed the tokens; a sequence that ends before the limit is not refused."""
    ahead = {"position_ids": torch.arange(50, 56)[None], "max_new_tokens": 9}
    with _compiled("reference") as model:
        launched = _launches(model, monkeypatch)
        assert model.generate(LATE_ENDS[:1], **ahead).shape == (1, 6 + 9)
        assert launched == [8]
        longer = {**ahead, "max_new_tokens": 20}
        with pytest.raises(UsageError, match="position"):
            model.generate(LATE_ENDS[:1], **longer)
        assert launched == [8, 8, 1]


def test_a_launch_ends_at_the_length_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [MaxLengthCriteria(9)]
    with _compiled("reference") as model:
        launched = _launches(model, monkeypatch)
        tokens = model.generate(LATE_ENDS, max_new_tokens=30, stopping_criteria=short)
        assert tokens.shape == (2, 9) and launched == [2]


def _launches(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of steps of each launch, but those of prompts."""
    ranks, step_counts = model._ranks, list[int]()
    assert isinstance(ranks, ProgramRanks)
    launch = ranks.launch

    def noted(step: Step, on_tokens: Any = None) -> torch.Tensor:
        if not step.rows:
            step_counts.append(step.steps)
        return launch(step, on_tokens)

    monkeypatch.setattr(ranks, "launch", noted)
    return step_counts


@pytest.mark.parametrize("ids", [IDS[:, :1], IDS[:, :4]])
def test_a_program_that_is_loaded_in_inference_mode(ids: torch.Tensor) -> None:
    """Its buffers are written by later calls, which may be in another mode."""
    with _compiled("native") as model:
        with torch.inference_mode():
            past = model(ids, use_cache=True).past_key_values
            wanted = model(ids, past_key_values=past).logits
        past.crop(-ids.shape[1])
        assert torch.equal(model(ids, past_key_values=past).logits, wanted)


def test_results_outlive_later_steps_in_any_mode() -> None:
    """The caller may change logits, outside inference mode too, and later steps change none."""
    with _compiled("native") as model:
        past = model(IDS, use_cache=True).past_key_values
        outputs = []
        for inference in (True, False, False, True, False):
            with torch.inference_mode(inference):
                logits = model(IDS[:, :1], past_key_values=past).logits
            outputs.append((inference, logits, logits.clone()))
            if not inference:
                logits.add_(1)
        past.crop(IDS.shape[1])
        for inference, logits, wanted in outputs:
            again = model(IDS[:, :1], past_key_values=past).logits
            assert torch.equal(again, wanted)
            assert torch.equal(logits, wanted if inference else wanted + 1)


def test_modules_have_no_program() -> None:
    with _compiled("torch") as model, pytest.raises(UnsupportedError, match="has no program"):
        _ = model.program


def test_what_cannot_be_lowered() -> None:
    """A pipeline that does not recognise the MLP is refused."""
    passes = "canonicalize,raise-norm,raise-rope,raise-attention,plan-sharding"
    with pytest.raises(UnsupportedError, match="is not part of any decode instruction"):
        _compiled("reference", pipeline=f"{passes},greedy-head,cache-kv")


def test_a_sequence_that_is_too_long() -> None:
    with _compiled("reference") as model, pytest.raises(UsageError, match="max_seq_len"):
        model.generate(IDS, max_new_tokens=60, min_new_tokens=60)


def test_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may not run prompts or decode steps, nor read weights."""
    steps: list[Step] = []
    with _compiled("reference") as model:
        ranks, pid = model._ranks, os.getpid()
        run = ranks.run
        monkeypatch.setattr(ranks, "run", lambda step: steps.append(step) or run(step))
        past = model(IDS, use_cache=True).past_key_values
        before = model(IDS[:, :1], past_key_values=past).logits
        assert [[part.by_program for part in parts_of(step, 1)] for step in steps] == [
            [False],
            [True],
        ]
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: pid + 1)
            for call in (
                lambda: model(IDS),
                lambda: model.generate(IDS),
                lambda: model.gather_weight("model.norm.weight"),
                lambda: ranks.parameter(0, "model.norm.weight"),
                *(partial(ranks.run, step) for step in steps),
            ):
                with pytest.raises(UsageError, match=rf"belongs to process {pid}; .* {pid + 1}"):
                    call()
        assert torch.equal(ranks.run(steps[-1]), before[:, -1])
