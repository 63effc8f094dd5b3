"""`generate` of a compiled model gives the answers of Hugging Face eager in all modes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import tpcompile
from tests.float64 import in_float64
from tests.mixtures import HYBRIDS
from tests.models import NEXT_CONFIG, TOLERANCE, relative_error
from tests.runtime.eager_pair import PAD, Both, lively, prompt, steps
from tpcompile.demo.model import demo_tokenizer
from tpcompile.runtime.cache_name import CACHE

NEW = 12


SHARED = {"shared_expert_intermediate_size": 80}
NEXT = {"model_type": "qwen3_next", "rope_parameters": NEXT_CONFIG["rope_parameters"]}
MODULES = {"backend": "torch"}
Subject = tuple[str, dict[str, Any], dict[str, Any]]
"""A preset, changes of it, and options of compilation."""

SUBJECTS: dict[str, Subject] = {
    "1": ("tiny-qwen3", {}, {"tp": 1}),
    "3": ("tiny-qwen3", {}, {"tp": 3}),
    "hybrid": ("tiny-qwen3.5", {}, {"tp": 3, **MODULES}),
    "qwen2-moe": (
        "tiny-qwen3-moe",
        {"model_type": "qwen2_moe", **SHARED},
        {"tp": 3, "experts": "tp"},
    ),
    "qwen3-moe": ("tiny-qwen3-moe", {}, {"tp": 2, "experts": "ep"}),
    "qwen3-next": ("tiny-qwen3.5-moe", NEXT, {"tp": 2, "experts": "tp", **MODULES}),
    "qwen3.5-moe": ("tiny-qwen3.5-moe", {}, {"tp": 3, "experts": "ep", **MODULES}),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def pair(request: pytest.FixtureRequest) -> Both:
    """Provide models with two KV heads; on three ranks, a head is on two of them.

    Models with linear attention run as modules.
    """
    name, changes, options = SUBJECTS[request.param]
    eager = lively(name, **changes)
    return Both(eager, tpcompile.compile(eager, simulate=True, **options))


@pytest.fixture(scope="module")
def draft() -> Both:
    """Provide a draft model with the same first layer, whose tokens are often right."""
    eager, small = lively("tiny-qwen3"), lively("tiny-qwen3")
    with torch.no_grad():
        for parameter in small.model.layers[-1].parameters():
            parameter.mul_(0.7)
    assert torch.equal(small.lm_head.weight, eager.lm_head.weight)
    return Both(small, tpcompile.compile(small, tp=2, simulate=True))


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "sampling, warped": {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 9},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "long beams": {"num_beams": 2, "length_penalty": 2.0},
    "repetition penalty": {"repetition_penalty": 1.5},
    "no n-gram twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[419], [75, 843]]},
    "minimum length": {"min_new_tokens": NEW, "eos_token_id": [238, 5]},
    "forced end": {"forced_eos_token_id": 7},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "prefill in chunks, beams": {"prefill_chunk_size": 4, "num_beams": 2},
    "without a cache": {"use_cache": False},
    "beams without a cache": {"use_cache": False, "num_beams": 2},
    "guided": {"guidance_scale": 1.5},
    "maximum length": {"max_length": 14, "max_new_tokens": None},
}

OF_CACHES = (
    "greedy",
    "samples",
    "beams returned",
    "sampled beams",
    "prefill in chunks, beams",
    "beams without a cache",
    "guided",
)
"""The modes that use caches in different ways; the others change logits alone, of any model."""
CASES = [
    *(("1", mode) for mode in ASKED),
    *(
        pytest.param(name, mode, marks=[pytest.mark.slow] * ((number + place) % 2))
        for number, name in enumerate(SUBJECTS)
        if name != "1"
        for place, mode in enumerate(OF_CACHES)
    ),
]
"""Every second mode of the other models runs by default, with every second model."""


@pytest.mark.parametrize(("pair", "case"), CASES, indirect=["pair"])
def test_as_eager_answers(pair: Both, case: str) -> None:
    inputs = prompt(5, 9, 2)
    if case == "guided":  # Hugging Face's own model cannot guide a padded batch
        inputs = prompt(9)
    pair.same(inputs.pop("input_ids"), **inputs, **{"max_new_tokens": NEW, **ASKED[case]})


def test_rows_that_end_at_different_times(pair: Both) -> None:
    """Rows end at any of several end tokens, and are padded afterwards."""
    inputs = prompt(5, 9, 2)
    ids = inputs.pop("input_ids")
    free = pair.same(ids, **inputs, max_new_tokens=NEW)
    ends = [free[0][ids.shape[1] + 2], free[1][ids.shape[1] + 6]]
    texts = pair.same(ids, **inputs, max_new_tokens=NEW, eos_token_id=ends)
    assert texts[0][ids.shape[1] + 3 :] == [PAD] * (NEW - 3)
    assert texts[2] == free[2]
    for mode in ({"do_sample": True}, {"num_beams": 2}):
        pair.same(ids, **inputs, max_new_tokens=NEW, eos_token_id=ends, **mode)


def test_all_that_eager_returns(pair: Both) -> None:
    inputs = prompt(4, 7)
    options = {
        "attention_mask": inputs["attention_mask"],
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    for mode in ({}, {"do_sample": True}, {"num_beams": 2}):
        expected, actual = pair.generate(inputs["input_ids"], **options, **mode)
        assert type(actual) is type(expected)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        for kind in ("scores", "logits"):
            ours, theirs = torch.stack(actual[kind]), torch.stack(expected[kind])
            finite = theirs.isfinite()
            assert torch.equal(ours.isfinite(), finite)
            if relative_error(ours[finite], theirs[finite]) < TOLERANCE:
                continue
            # Some hybrids amplify rounding: see AMPLIFYING in tests/test_hybrids.py.
            exact = torch.stack(in_fp64(pair.eager, inputs["input_ids"], **options, **mode)[kind])
            errors = [relative_error(values[finite], exact[finite]) for values in (ours, theirs)]
            assert errors[0] < 2 * errors[1], errors
        ours, theirs = actual.past_key_values, expected.past_key_values
        assert ours.get_seq_length() == theirs.get_seq_length()


def in_fp64(eager: Any, ids: torch.Tensor, **options: Any) -> Any:
    """Generate as `Both.generate` does, in fp64."""

    def generated(model: Any) -> Any:
        model.set_experts_implementation("eager")  # grouped products have no fp64
        torch.manual_seed(11)
        return model.generate(ids, pad_token_id=PAD, **options)

    return in_float64(eager, generated)


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 2}])
def test_padding_on_the_right_is_refused(pair: Both, mode: dict[str, Any]) -> None:
    """Padding on the right is refused; Hugging Face warns and continues after the padding."""
    ids, mask = prompt(5, 5)["input_ids"], torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    with pytest.raises(tpcompile.UsageError, match="padding on the left"):
        pair.compiled.generate(ids, attention_mask=mask, max_new_tokens=2, **mode)


class Heard(BaseStreamer):
    """Streamer that records what it receives."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append((value.tolist(), tuple(value.shape)))

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"return_dict_in_generate": True}])
def test_streamers_are_told_the_same(pair: Both, options: dict[str, Any]) -> None:
    streamers = []
    for model in pair.each():
        streamers.append(Heard())
        model.generate(
            prompt(6)["input_ids"],
            max_new_tokens=4,
            pad_token_id=PAD,
            streamer=streamers[-1],
            **options,
        )
    assert streamers[0].told == streamers[1].told
    assert len(streamers[0].told) == 1 + 4 + 1


def test_text_is_streamed(pair: Both, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, printed = demo_tokenizer(), []
    ids = tokenizer("Anna is a", return_tensors="pt")["input_ids"]
    for model in pair.each():
        model.generate(
            ids,
            max_new_tokens=6,
            suppress_tokens=list(range(len(tokenizer), 1013)),
            streamer=TextStreamer(tokenizer, skip_prompt=True),
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


class AfterRow(StoppingCriteria):
    """Stopping criterion that ends each row one token earlier than the row before."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.length - torch.arange(len(input_ids))
        return input_ids.shape[1] >= ends


def test_stopping_criteria_of_ones_own(pair: Both) -> None:
    inputs = prompt(5, 9)
    criteria = StoppingCriteriaList([AfterRow(15)])
    ids = inputs.pop("input_ids")
    (length, _) = map(len, pair.same(ids, **inputs, max_new_tokens=20, stopping_criteria=criteria))
    assert length == 15


def test_no_time(pair: Both) -> None:
    assert len(pair.same(prompt(5)["input_ids"], max_new_tokens=20, max_time=0.0)[0]) == 6


def test_strings_that_end_a_text(pair: Both) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer("Anna is a", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 8, "suppress_tokens": list(range(len(tokenizer), 1013))}
    text = tokenizer.decode(pair.same(ids, **options)[0][ids.shape[1] :])
    options |= {"stop_strings": re.findall("[a-z]{2}", text[4:])[:1], "tokenizer": tokenizer}
    assert len(pair.same(ids, **options)[0]) < ids.shape[1] + 8


class Push(LogitsProcessor):
    """User-defined processor that excludes the best token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, scores.argmax(1, keepdim=True), float("-inf"))


def test_logits_processors_of_ones_own(pair: Both) -> None:
    ids = prompt(5)["input_ids"]
    pushed = pair.same(ids, max_new_tokens=4, logits_processor=LogitsProcessorList([Push()]))
    assert pushed != pair.same(ids, max_new_tokens=4)


def _refuses_help(pair: Both, **options: Any) -> bool:
    """Return whether models refuse to be assisted: states of linear attention cannot go back."""
    if pair.compiled.config.model_type not in ("qwen3_5_text", *HYBRIDS):
        return False
    for model in pair.each():
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(prompt(7)["input_ids"], max_new_tokens=NEW, **options)
    return True


def test_assisted_decoding_both_ways(pair: Both, draft: Both) -> None:
    """Compiled and eager models can assist each other, and can use a smaller draft model."""
    if _refuses_help(pair, assistant_model=draft.compiled):
        return
    ids = prompt(7)["input_ids"]
    alone = pair.same(ids, max_new_tokens=NEW)
    for model, assistant in (
        (pair.compiled, draft.compiled),
        (pair.compiled, draft.eager),
        (pair.eager, draft.compiled),
        (pair.compiled, pair.eager),
    ):
        assistant.generation_config.num_assistant_tokens = 4
        with_help = model.generate(
            ids, max_new_tokens=NEW, pad_token_id=PAD, assistant_model=assistant
        )
        assert with_help.tolist() == alone


def test_sampling_with_an_assistant(pair: Both, draft: Both) -> None:
    if _refuses_help(pair, assistant_model=draft.compiled, do_sample=True):
        return
    outputs = []
    for kind in ("eager", "compiled"):
        torch.manual_seed(3)
        assistant = getattr(draft, kind)
        outputs.append(
            getattr(pair, kind).generate(
                prompt(7)["input_ids"],
                max_new_tokens=NEW,
                pad_token_id=PAD,
                do_sample=True,
                assistant_model=assistant,
            )
        )
    assert outputs[0].tolist() == outputs[1].tolist()


def test_prompt_lookup(pair: Both) -> None:
    if _refuses_help(pair, prompt_lookup_num_tokens=3):
        return
    ids = prompt(4)["input_ids"].repeat(1, 4)
    alone = pair.same(ids, max_new_tokens=NEW)
    assert pair.same(ids, max_new_tokens=NEW, prompt_lookup_num_tokens=3) == alone
    pair.same(ids, max_new_tokens=NEW, prompt_lookup_num_tokens=3, do_sample=True)


def test_a_conversation_goes_on_where_it_ended(pair: Both) -> None:
    """Each turn passes the whole conversation, and only its new tokens are computed."""
    more = prompt(6, 6, seed=1)["input_ids"]
    conversation, caches = prompt(5, 5)["input_ids"], [None, None]
    for turn in range(2):
        with steps(pair.compiled) as recorded:
            turns = []
            for index, model in enumerate(pair.each()):
                turns.append(
                    model.generate(
                        conversation,
                        max_new_tokens=4,
                        pad_token_id=PAD,
                        return_dict_in_generate=True,
                        **{CACHE: caches[index]},
                    )
                )
                caches[index] = turns[-1][CACHE]
        assert turns[0].sequences.tolist() == turns[1].sequences.tolist()
        assert recorded[0].inputs["input_ids"].numel() == (2 * 5 if turn == 0 else 2 * 7)
        conversation = torch.cat([turns[1].sequences, more], 1)


def test_a_prompt_that_many_share(pair: Both) -> None:
    start = prompt(9)["input_ids"]
    cache = pair.compiled(start).past_key_values
    used = pair.compiled._pool.used
    for seed in range(3):
        ids = torch.cat([start, prompt(3 + seed, seed=seed)["input_ids"]], 1)
        tokens = pair.compiled.generate(
            ids, past_key_values=copy.deepcopy(cache), max_new_tokens=5, pad_token_id=PAD
        )
        assert tokens.tolist() == pair.same(ids, max_new_tokens=5)
    assert cache.get_seq_length() == 9
    assert pair.compiled._pool.used == used


def test_a_generation_config_of_ones_own(pair: Both) -> None:
    config = GenerationConfig(max_new_tokens=5, num_beams=2, pad_token_id=PAD)
    assert len(pair.same(prompt(4)["input_ids"], generation_config=config)[0]) == 9


SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "tiny-qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "mistral": ("tiny-qwen3", {"model_type": "mistral", "sliding_window": 5}),
}


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_windows(name: str) -> None:
    """Prompts and texts longer than the window agree with eager."""
    preset, changes = SLIDING[name]
    eager = lively(preset, **changes)
    with tpcompile.compile(eager, tp=2, simulate=True) as model:
        pair, inputs = Both(eager, model), prompt(4, 13)
        ids = inputs.pop("input_ids")
        for mode in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
            pair.same(ids, **inputs, max_new_tokens=15, **mode)
        wide = prompt(13)["input_ids"]
        pair.same(wide.repeat(1, 2), max_new_tokens=15, prompt_lookup_num_tokens=3)
