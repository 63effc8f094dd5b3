"""Assisted generation: greedy tokens and their logits have the bits of plain generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation import utils

import tpcompile
from tests.backends.reference.step_models import lively_experts
from tests.runtime.eager_pair import listening, lively
from tpcompile.errors import RankError
from tpcompile.runtime import guessed
from tpcompile.runtime.ranks.program import ProgramRanks

pytestmark = pytest.mark.usefixtures("captured_once")
PAD = 0
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


@pytest.fixture(
    scope="module",
    params=[
        (lambda: lively("tiny-qwen3"), {"tp": 3}),
        (lambda: lively("tiny-qwen2").bfloat16(), {}),
        (lambda: lively("tiny-qwen3").bfloat16(), {"tp": 2, "weights": "int4:32"}),
        (lambda: lively_experts().bfloat16(), {"tp": 2}),
    ],
    ids=["fp32, 3 ranks", "bf16", "int4, 2 ranks", "experts, 2 ranks"],
)
def model(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    make, options = request.param
    with tpcompile.compile(make(), max_seq_len=160, **options) as compiled:
        yield compiled


def greedy(model: Any, ids: torch.Tensor = IDS, new: int = 60, **options: Any) -> Any:
    """Return the tokens and the logits of each."""
    output = model.generate(
        ids,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return output.sequences, torch.cat(output.logits)


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(*tensors) for tensors in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("number", "length"), [(1, 10), (3, 1), (3, 10), (10, 2), (20, 1), (20, 10)]
)
def test_guesses_from_the_prompt(model: Any, number: int, length: int) -> None:
    """More guesses than rows are computed in several steps."""
    ids = IDS[:, :length]
    plain, before = greedy(model, ids), model.steps
    assert same(greedy(model, ids, prompt_lookup_num_tokens=number), plain)
    counts = [now - past for now, past in zip(model.steps, before, strict=True)]
    assert counts[2] >= counts[3] and (counts[2] > 0 or length < 10)
    assert counts[1] == (length > 1)
    assert torch.equal(plain[0], model.generate(ids, max_new_tokens=60, eos_token_id=None))


def test_an_assistant(model: Any) -> None:
    """The model assists itself. It computes its last tokens as a prompt, so guesses may differ."""
    plain, before = greedy(model), model.steps
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0.0
    assert same(greedy(model, assistant_model=model), plain)
    drafted, accepted = (now - past for now, past in zip(model.steps[2:], before[2:], strict=True))
    assert drafted >= accepted > 0.8 * drafted


def test_an_assistant_logs_no_warning(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's loop passes an assistant a configuration and lengths, which is deprecated."""
    logged: list[str] = []
    monkeypatch.setattr(utils.logger, "warning_once", lambda text, *_: logged.append(text))
    with listening() as heard:
        ids = model.generate(IDS, max_new_tokens=20, assistant_model=model, pad_token_id=PAD)
    assert ids.shape[1] == IDS.shape[1] + 20
    assert (logged, heard) == ([], [])


def test_without_rows_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, modules round otherwise: this is what rows are for."""
    with tpcompile.compile(lively("tiny-qwen2").bfloat16(), max_seq_len=160) as model:
        plain = greedy(model)
        monkeypatch.setattr(type(model), "computes_rows", property(lambda self: False))
        assert not same(greedy(model, prompt_lookup_num_tokens=10), plain)


def test_rows_of_another_length_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that saw a later row would have other logits."""
    from tpcompile.runtime.ranks import program

    true = program.in_rows

    def seeing_all(step: Any) -> Any:
        row_step = true(step)
        if step.rows:
            counts = step.inputs["starts"].diff()
            lengths = step.inputs["lengths"].repeat_interleave(counts)
            row_step.inputs["lengths"].copy_(lengths)
        return row_step

    with tpcompile.compile(lively("tiny-qwen2"), max_seq_len=160) as model:
        plain = greedy(model)
        monkeypatch.setattr(program, "in_rows", seeing_all)
        with pytest.raises(Exception, match="must continue the sequence of the row before it"):
            greedy(model, prompt_lookup_num_tokens=10)
        monkeypatch.undo()
        assert same(greedy(model, prompt_lookup_num_tokens=10), plain)


def test_a_step_that_fails_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has the columns of before, and the next call the same results."""
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        cache = model.new_cache()
        model(IDS, past_key_values=cache)
        ids = IDS[:, :8]
        cache.guesses = model.guesses
        wanted = model(ids, past_key_values=cache, logits_to_keep=8).logits
        cache.crop(-8)
        monkeypatch.setattr(guessed, "MOST_ROWS", 3)
        launch, calls = ProgramRanks.launch, [0]

        def fails(self: Any, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                raise RankError("a rank died")
            return launch(self, *arguments)

        monkeypatch.setattr(ProgramRanks, "launch", fails)
        with pytest.raises(RankError):
            model(ids, past_key_values=cache, logits_to_keep=8)
        assert cache.get_seq_length() == IDS.shape[1]
        cache.guesses = model.guesses
        assert torch.equal(model(ids, past_key_values=cache, logits_to_keep=8).logits, wanted)


def test_sampling_keeps_the_order_of_hugging_face(model: Any) -> None:
    """Sampled assisted tokens are drawn in Hugging Face's order, from the logits of rows."""
    torch.manual_seed(1)
    first = model.generate(IDS, max_new_tokens=20, do_sample=True, prompt_lookup_num_tokens=3)
    torch.manual_seed(1)
    second = model.generate(IDS, max_new_tokens=20, do_sample=True, prompt_lookup_num_tokens=3)
    assert torch.equal(first, second)


def test_router_logits_of_guessed_tokens() -> None:
    """A call that asks for the logits of routers is run by modules, as any other such call."""
    with tpcompile.compile(lively_experts(), max_seq_len=64) as model:
        cache = model.new_cache()
        model(IDS, past_key_values=cache)
        cache.guesses = model.guesses
        output = model(
            IDS[:, :3], past_key_values=cache, logits_to_keep=3, output_router_logits=True
        )
        assert output.logits.shape[1] == 3 and len(output.router_logits)
