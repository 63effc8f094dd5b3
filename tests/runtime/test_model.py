"""`CompiledModel` has the interface of Hugging Face's models: logits, caches, limits, refusals."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tpcompile
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import PAD, Both, lively, prompt, steps
from tpcompile.runtime.cache_name import CACHE


@pytest.fixture(scope="module")
def pair() -> Both:
    eager = lively("tiny-qwen3")
    return Both(eager, tpcompile.compile(eager, tp=3, simulate=True))


def _close(actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    if mask is not None:
        actual, expected = actual[mask.bool()], expected[mask.bool()]
    return actual.shape == expected.shape and relative_error(actual, expected) < TOLERANCE


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(pair: Both, side: str) -> None:
    inputs = prompt(5, 9, 1)
    if side == "right":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    logits = _logits(pair.compiled, **inputs)
    assert _close(logits, _logits(pair.eager, **inputs), inputs["attention_mask"])


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([2, 8]), torch.tensor([-1])])
def test_only_the_logits_asked_for(pair: Both, keep: int | torch.Tensor) -> None:
    inputs = prompt(9, 9)
    with steps(pair.compiled) as recorded:
        logits = _logits(pair.compiled, **inputs, logits_to_keep=keep)
    assert _close(logits, _logits(pair.eager, **inputs, logits_to_keep=keep))
    assert recorded[0].inputs["logit_rows"].numel() == logits.shape[0] * logits.shape[1]


@pytest.mark.parametrize("cuts", [(4, 5), (1, 7), (3,), tuple(range(1, 12))])
def test_a_cache_goes_on(pair: Both, cuts: tuple[int, ...]) -> None:
    """A sequence can be split into calls of any length with a growing mask."""
    inputs = prompt(8, 12)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected, cache = _logits(pair.eager, **inputs), pair.compiled.new_cache()
    for start, end in zip((0, *cuts), (*cuts, 12), strict=True):
        out = pair.compiled(ids[:, start:end], mask[:, :end], past_key_values=cache)
        cache = out.past_key_values
        real = mask[:, start:end]
        assert _close(out.logits, expected[:, start:end], real)
    assert cache.get_seq_length() == 12
    assert cache.lengths == (8, 12)


def test_a_cache_takes_what_eager_takes(pair: Both) -> None:
    """A cached call may omit the mask without padding, and may pass positions, as in eager."""
    ids = prompt(6)["input_ids"]
    with torch.no_grad():
        cache = pair.compiled(ids[:, :4], use_cache=True).past_key_values
        expected = pair.eager(ids[:, :4], use_cache=True).past_key_values
    assert _close(
        _logits(pair.compiled, input_ids=ids[:, 4:], past_key_values=copy.deepcopy(cache)),
        _logits(pair.eager, input_ids=ids[:, 4:], **{CACHE: copy.deepcopy(expected)}),
    )
    inputs = {"input_ids": ids[:, 4:], "position_ids": torch.tensor([[9, 11]])}
    assert _close(
        _logits(pair.compiled, **inputs, past_key_values=cache),
        _logits(pair.eager, **inputs, **{CACHE: expected}),
    )


@pytest.mark.parametrize("use", [None, True, False])
@pytest.mark.parametrize("with_cache", [True, False])
def test_when_a_cache_comes_back(pair: Both, use: bool | None, with_cache: bool) -> None:
    caches = (pair.compiled.new_cache(), DynamicCache()) if with_cache else (None, None)
    outs = [
        model(torch.tensor([[5, 6]]), use_cache=use, **{CACHE: cache})
        for model, cache in zip((pair.compiled, pair.eager), caches, strict=True)
    ]
    if with_cache and use is False:
        assert caches[0].get_seq_length() == 2  # a given cache is updated, as in eager
    else:
        assert (outs[0].past_key_values is None) == (outs[1].past_key_values is None)
        assert len(outs[0].to_tuple()) == len(outs[1].to_tuple())


def test_a_cache_that_is_dropped_gives_its_blocks_back(pair: Both) -> None:
    used = pair.compiled._pool.used
    cache = pair.compiled(**prompt(40, 3)).past_key_values
    assert pair.compiled._pool.used == used + 3
    del cache
    assert pair.compiled._pool.used == used


def test_what_a_failed_call_leaves(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call leaves the cache unchanged and usable."""
    ids = prompt(40)["input_ids"]
    cache = pair.compiled(ids[:, :30]).past_key_values
    used = pair.compiled._pool.used

    def fails(step: Any) -> Any:
        raise tpcompile.UsageError("Not now")

    with monkeypatch.context() as patch:
        patch.setattr(pair.compiled._ranks, "run", fails)
        with pytest.raises(tpcompile.UsageError, match="Not now"):
            pair.compiled(ids[:, 30:], past_key_values=cache)
    assert cache.get_seq_length() == 30 and pair.compiled._pool.used == used
    logits = pair.compiled(ids[:, 30:], past_key_values=cache).logits
    assert _close(logits, _logits(pair.eager, input_ids=ids)[:, 30:])


def test_the_end_of_max_seq_len(pair: Both) -> None:
    with tpcompile.compile(pair.eager, tp=2, simulate=True, max_seq_len=40) as model:
        ids = prompt(36)["input_ids"]
        full = Both(pair.eager, model).same(ids, max_new_tokens=5)  # the last is not fed
        with pytest.raises(
            tpcompile.UsageError, match=r"at most max_seq_len=40 tokens\. Found 41 tokens"
        ):
            model.generate(ids, max_new_tokens=6, pad_token_id=PAD)
        with pytest.raises(tpcompile.UsageError, match="max_seq_len=50"):
            model(prompt(50)["input_ids"])
        assert model.generate(ids, max_new_tokens=5, pad_token_id=PAD).tolist() == full
        assert model._pool.used == 0


def test_the_end_of_max_batch(pair: Both) -> None:
    with tpcompile.compile(pair.eager, tp=2, simulate=True, max_batch=2) as model:
        limited, inputs = Both(pair.eager, model), prompt(3, 5)
        limited.same(max_new_tokens=3, ids=inputs["input_ids"])
        with pytest.raises(tpcompile.UsageError, match=r"at most max_batch=2.*Beams"):
            model.generate(**inputs, max_new_tokens=3, num_beams=2, pad_token_id=PAD)
        limited.same(inputs["input_ids"][:1], max_new_tokens=3, num_beams=2)


def test_caches_that_are_not_this_models(pair: Both) -> None:
    with tpcompile.compile(pair.eager, tp=1) as other:
        strange = other(torch.tensor([[5]])).past_key_values
        for cache in (strange, DynamicCache(), ((None, None),)):
            with pytest.raises(tpcompile.UsageError, match="must be a cache of this model"):
                pair.compiled(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(tpcompile.UsageError, match="must be a cache of this model"):
            pair.compiled.generate(
                torch.tensor([[5, 6]]), past_key_values=strange, max_new_tokens=2, pad_token_id=PAD
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"inputs_embeds": torch.zeros(1, 1, 96)}, "inputs_embeds"),
        ({"labels": torch.tensor([[5]])}, "labels"),
    ],
)
def test_what_is_not_to_be_had_is_refused(
    pair: Both, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(tpcompile.UnsupportedError, match=message):
        pair.compiled(torch.tensor([[5]]), **options)
    if message.startswith("output"):
        with pytest.raises(tpcompile.UnsupportedError, match=message):
            pair.compiled.generate(
                torch.tensor([[5]]),
                max_new_tokens=2,
                pad_token_id=PAD,
                return_dict_in_generate=True,
                **options,
            )


def test_a_typing_mistake_is_told_as_hugging_face_tells_it(pair: Both) -> None:
    for model in pair.each():
        with pytest.raises(ValueError, match="max_new_tokns"):
            model.generate(torch.tensor([[5]]), max_new_tokns=2)


MOVES = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_compiled_model_stays_where_it_is(pair: Both, move: str) -> None:
    with pytest.raises(tpcompile.UsageError, match=r"cannot change.*float32 on cpu"):
        MOVES[move](pair.compiled)
    assert pair.compiled.to("cpu") is pair.compiled
    assert pair.compiled.float().eval() is pair.compiled


def test_its_stages_are_one_line_each(pair: Both) -> None:
    lines = repr(pair.compiled.stages).splitlines()
    assert len(lines) == len(pair.compiled.stages)
    assert re.fullmatch(r"  0  <stage capture: 0 matches, 0 → \d+ nodes>", lines[0])
    assert any("<stage plan-sharding{tp=3}: " in line for line in lines)
    assert max(map(len, lines)) < 80
    assert "\n" not in repr(pair.compiled.plan)


def test_its_name(pair: Both) -> None:
    """The class has the name of Hugging Face's class, which its pipelines look up."""
    assert isinstance(pair.compiled, tpcompile.CompiledModel)
    assert type(pair.compiled).__name__ == type(pair.eager).__name__
    assert repr(pair.compiled) == "CompiledModel(Qwen3ForCausalLM, tp=3, dtype=torch.float32)"
    with tpcompile.compile("preset:tiny-qwen2", random_weights=0) as model:
        assert type(model).__name__ == "Qwen2ForCausalLM"
