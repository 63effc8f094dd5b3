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
def both() -> Both:
    eager = lively("tiny-qwen3")
    return Both(eager, tpcompile.compile(eager, tp=3, simulate=True))


def _close(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    if mask is not None:
        found, expected = found[mask.bool()], expected[mask.bool()]
    return found.shape == expected.shape and relative_error(found, expected) < TOLERANCE


def _logits(model: Any, **given: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**given).logits
    return logits


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(both: Both, side: str) -> None:
    given = prompt(5, 9, 1)
    if side == "right":
        given = {name: value.flip(1) for name, value in given.items()}
    found = _logits(both.compiled, **given)
    assert _close(found, _logits(both.eager, **given), given["attention_mask"])


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([2, 8]), torch.tensor([-1])])
def test_only_the_logits_asked_for(both: Both, keep: int | torch.Tensor) -> None:
    given = prompt(9, 9)
    with steps(both.compiled) as seen:
        found = _logits(both.compiled, **given, logits_to_keep=keep)
    assert _close(found, _logits(both.eager, **given, logits_to_keep=keep))
    assert seen[0].inputs["logit_rows"].numel() == found.shape[0] * found.shape[1]


@pytest.mark.parametrize("cuts", [(4, 5), (1, 7), (3,), tuple(range(1, 12))])
def test_a_cache_goes_on(both: Both, cuts: tuple[int, ...]) -> None:
    """A sequence can be split into calls of any length with a growing mask."""
    given = prompt(8, 12)
    ids, mask = given["input_ids"], given["attention_mask"]
    expected, cache = _logits(both.eager, **given), both.compiled.new_cache()
    for start, end in zip((0, *cuts), (*cuts, 12), strict=True):
        out = both.compiled(ids[:, start:end], mask[:, :end], past_key_values=cache)
        cache = out.past_key_values
        real = mask[:, start:end]
        assert _close(out.logits, expected[:, start:end], real)
    assert cache.get_seq_length() == 12
    assert cache.lengths == (8, 12)


def test_a_cache_takes_what_eager_takes(both: Both) -> None:
    """A cached call may omit the mask without padding, and may pass positions, as in eager."""
    ids = prompt(6)["input_ids"]
    with torch.no_grad():
        found = both.compiled(ids[:, :4], use_cache=True).past_key_values
        expected = both.eager(ids[:, :4], use_cache=True).past_key_values
    assert _close(
        _logits(both.compiled, input_ids=ids[:, 4:], past_key_values=copy.deepcopy(found)),
        _logits(both.eager, input_ids=ids[:, 4:], **{CACHE: copy.deepcopy(expected)}),
    )
    given = {"input_ids": ids[:, 4:], "position_ids": torch.tensor([[9, 11]])}
    assert _close(
        _logits(both.compiled, **given, past_key_values=found),
        _logits(both.eager, **given, **{CACHE: expected}),
    )


@pytest.mark.parametrize("use", [None, True, False])
@pytest.mark.parametrize("given", [True, False])
def test_when_a_cache_comes_back(both: Both, use: bool | None, given: bool) -> None:
    caches = (both.compiled.new_cache(), DynamicCache()) if given else (None, None)
    outs = [
        model(torch.tensor([[5, 6]]), use_cache=use, **{CACHE: cache})
        for model, cache in zip((both.compiled, both.eager), caches, strict=True)
    ]
    if given and use is False:
        assert caches[0].get_seq_length() == 2  # a given cache is updated, as in eager
    else:
        assert (outs[0].past_key_values is None) == (outs[1].past_key_values is None)
        assert len(outs[0].to_tuple()) == len(outs[1].to_tuple())


def test_a_cache_that_is_dropped_gives_its_blocks_back(both: Both) -> None:
    used = both.compiled._pool.used
    cache = both.compiled(**prompt(40, 3)).past_key_values
    assert both.compiled._pool.used == used + 3
    del cache
    assert both.compiled._pool.used == used


def test_what_a_failed_call_leaves(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call leaves the cache unchanged and usable."""
    ids = prompt(40)["input_ids"]
    cache = both.compiled(ids[:, :30]).past_key_values
    used = both.compiled._pool.used

    def fails(step: Any) -> Any:
        raise tpcompile.UsageError("Not now")

    with monkeypatch.context() as patch:
        patch.setattr(both.compiled._ranks, "run", fails)
        with pytest.raises(tpcompile.UsageError, match="Not now"):
            both.compiled(ids[:, 30:], past_key_values=cache)
    assert cache.get_seq_length() == 30 and both.compiled._pool.used == used
    found = both.compiled(ids[:, 30:], past_key_values=cache).logits
    assert _close(found, _logits(both.eager, input_ids=ids)[:, 30:])


def test_the_end_of_max_seq_len(both: Both) -> None:
    with tpcompile.compile(both.eager, tp=2, simulate=True, max_seq_len=40) as model:
        ids = prompt(36)["input_ids"]
        full = Both(both.eager, model).same(ids, max_new_tokens=5)  # the last is not fed
        with pytest.raises(
            tpcompile.UsageError, match=r"at most max_seq_len=40 tokens\. Found 41 tokens"
        ):
            model.generate(ids, max_new_tokens=6, pad_token_id=PAD)
        with pytest.raises(tpcompile.UsageError, match="max_seq_len=50"):
            model(prompt(50)["input_ids"])
        assert model.generate(ids, max_new_tokens=5, pad_token_id=PAD).tolist() == full
        assert model._pool.used == 0


def test_the_end_of_max_batch(both: Both) -> None:
    with tpcompile.compile(both.eager, tp=2, simulate=True, max_batch=2) as model:
        both_here, given = Both(both.eager, model), prompt(3, 5)
        both_here.same(max_new_tokens=3, ids=given["input_ids"])
        with pytest.raises(tpcompile.UsageError, match=r"at most max_batch=2.*Beams"):
            model.generate(**given, max_new_tokens=3, num_beams=2, pad_token_id=PAD)
        both_here.same(given["input_ids"][:1], max_new_tokens=3, num_beams=2)


def test_caches_that_are_not_this_models(both: Both) -> None:
    with tpcompile.compile(both.eager, tp=1) as other:
        strange = other(torch.tensor([[5]])).past_key_values
        for cache in (strange, DynamicCache(), ((None, None),)):
            with pytest.raises(tpcompile.UsageError, match="must be a cache of this model"):
                both.compiled(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(tpcompile.UsageError, match="must be a cache of this model"):
            both.compiled.generate(
                torch.tensor([[5, 6]]), past_key_values=strange, max_new_tokens=2, pad_token_id=PAD
            )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"inputs_embeds": torch.zeros(1, 1, 96)}, "inputs_embeds"),
        ({"labels": torch.tensor([[5]])}, "labels"),
    ],
)
def test_what_is_not_to_be_had_is_refused(both: Both, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(tpcompile.UnsupportedError, match=said):
        both.compiled(torch.tensor([[5]]), **asked)
    if said.startswith("output"):
        with pytest.raises(tpcompile.UnsupportedError, match=said):
            both.compiled.generate(
                torch.tensor([[5]]),
                max_new_tokens=2,
                pad_token_id=PAD,
                return_dict_in_generate=True,
                **asked,
            )


def test_a_typing_mistake_is_told_as_hugging_face_tells_it(both: Both) -> None:
    for model in both.each():
        with pytest.raises(ValueError, match="max_new_tokns"):
            model.generate(torch.tensor([[5]]), max_new_tokns=2)


MOVES = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_compiled_model_stays_where_it_is(both: Both, move: str) -> None:
    with pytest.raises(tpcompile.UsageError, match=r"cannot change.*float32 on cpu"):
        MOVES[move](both.compiled)
    assert both.compiled.to("cpu") is both.compiled
    assert both.compiled.float().eval() is both.compiled


def test_its_stages_are_one_line_each(both: Both) -> None:
    lines = repr(both.compiled.stages).splitlines()
    assert len(lines) == len(both.compiled.stages)
    assert re.fullmatch(r"  0  <stage capture: 0 matches, 0 → \d+ nodes>", lines[0])
    assert any("<stage plan-sharding{tp=3}: " in line for line in lines)
    assert max(map(len, lines)) < 80
    assert "\n" not in repr(both.compiled.plan)


def test_its_name(both: Both) -> None:
    """The class has the name of Hugging Face's class, which its pipelines look up."""
    assert isinstance(both.compiled, tpcompile.CompiledModel)
    assert type(both.compiled).__name__ == type(both.eager).__name__
    assert repr(both.compiled) == "CompiledModel(Qwen3ForCausalLM, tp=3, dtype=torch.float32)"
    with tpcompile.compile("preset:tiny-qwen2", random_weights=0) as model:
        assert type(model).__name__ == "Qwen2ForCausalLM"
