"""Greedy decoding requests tokens from the ranks, and logits only where needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import tpcompile
from tests.models import pair_of, preset_pair
from tests.remote_code import add_code, answer_yes
from tests.runtime.eager_pair import PAD, Both, lively, prompt, steps
from tpcompile.passes import default_pipeline
from tpcompile.presets import preset
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.generation import generation_config_of, without_sampling


@pytest.fixture(scope="module")
def pair() -> Both:
    eager = lively("tiny-qwen3")
    return Both(eager, tpcompile.compile(eager, tp=3, simulate=True))


@pytest.fixture(scope="module")
def modules(pair: Both) -> Both:
    """The same model, with modules that run every step."""
    return Both(pair.eager, tpcompile.compile(pair.eager, tp=3, simulate=True, backend="torch"))


NEEDS_TOKENS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": [5, 6]},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "a time limit": {"max_time": 100.0},
}

NEEDS_LOGITS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 2},
    "a processor": {"repetition_penalty": 1.2},
    "no cache": {"use_cache": False},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("case", [*NEEDS_TOKENS, *NEEDS_LOGITS])
def test_what_the_ranks_are_asked_for(modules: Both, case: str) -> None:
    inputs = prompt(5, 9)
    options = (NEEDS_TOKENS | NEEDS_LOGITS)[case]
    with steps(modules.compiled) as recorded:
        modules.compiled.generate(**inputs, max_new_tokens=4, pad_token_id=PAD, **options)
    wanted = "tokens" if case in NEEDS_TOKENS else "logits"
    assert {step.output for step in recorded} == {wanted}
    assert len(recorded) == (6 if "chunk" in case else 4)
    if wanted == "tokens":
        assert {step.inputs["logit_rows"].numel() for step in recorded} <= {1, 2}


def test_only_new_tokens_are_computed(modules: Both) -> None:
    with steps(modules.compiled) as recorded:
        modules.compiled.generate(**prompt(5, 9), max_new_tokens=4, pad_token_id=PAD)
    assert [step.inputs["input_ids"].numel() for step in recorded] == [14, 2, 2, 2]
    assert [step.inputs["lengths"].tolist() for step in recorded][-1] == [8, 12]


def test_equal_logits_pick_the_lowest_id() -> None:
    """Ties go to the lowest id; each head row occurs on all ranks, and twice on the first."""
    eager = lively("tiny-qwen3", vocab_size=24, bos_token_id=None, eos_token_id=None)
    with torch.no_grad():
        eager.lm_head.weight.copy_(eager.lm_head.weight[:4].repeat(6, 1))
    ids = prompt(3, 5, vocabulary=24)
    for tp in (1, 2, 3):
        with tpcompile.compile(eager, tp=tp, simulate=True) as model:
            texts = Both(eager, model).same(ids["input_ids"], max_new_tokens=10)
        assert {token for row in texts for token in row[5:]} <= {0, 1, 2, 3}


def test_pipelines_without_a_greedy_head() -> None:
    """Without greedy-head, tokens come from logits, and the text is the same."""
    eager = lively("tiny-qwen3")
    passes = [current for current in default_pipeline(2) if current.name != "greedy-head"]
    options: dict[str, Any] = {"simulate": True, "pipeline": passes, "backend": "torch"}
    with tpcompile.compile(eager, tp=2, **options) as model:
        with steps(model) as recorded:
            Both(eager, model).same(prompt(5)["input_ids"], max_new_tokens=6)
        assert {step.output for step in recorded} == {"logits"}


def test_pipelines_without_a_cache() -> None:
    passes = [current for current in default_pipeline(2) if current.name != "cache-kv"]
    with tpcompile.compile(lively("tiny-qwen3"), 2, simulate=True, pipeline=passes) as model:
        assert not model.can_generate()
        assert model(torch.tensor([[4, 5]])).past_key_values is None
        for refused in (
            lambda: model.generate(torch.tensor([[4, 5]]), max_new_tokens=2),
            lambda: model(torch.tensor([[4, 5]]), use_cache=True),
            model.new_cache,
        ):
            with pytest.raises(tpcompile.UnsupportedError, match="cache-kv"):
                refused()


def test_settings_come_from_the_model_the_checkpoint_or_the_configuration(tmp_path: Any) -> None:
    eager = lively("tiny-qwen3")
    eager.generation_config.max_new_tokens = 3
    eager.generation_config.pad_token_id = PAD
    eager.save_pretrained(tmp_path)
    ids = prompt(4)["input_ids"]
    for source in (eager, tmp_path):
        with tpcompile.compile(source, simulate=True) as model:
            assert model.generation_config is not eager.generation_config
            assert model.generate(ids).shape == (1, 7)
    with tpcompile.compile("preset:tiny-qwen3", random_weights=0) as model:
        assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_code_for_generation_is_neither_run_nor_asked_about(
    pair: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answer_yes(monkeypatch)
    mark = add_code(tmp_path, "generation_config.json", AutoConfig="evil.Config")
    ids = prompt(4)["input_ids"]
    code: dict[str, Any] = {"custom_generate": str(tmp_path)}
    for options in (
        code,
        {**code, "trust_remote_code": True},
        {**code, "trust_remote_code": False},
        {"custom_generate": tmp_path},
        {"trust_remote_code": True},
    ):
        with pytest.raises(tpcompile.UnsupportedError, match="does not run generation code"):
            pair.compiled.generate(ids, max_new_tokens=2, **options)
    with pytest.raises(tpcompile.UnsupportedError, match="does not run generation code"):
        pair.compiled.generate(ids, *[None] * 9, str(tmp_path))
    with pytest.raises(tpcompile.UnsupportedError, match="does not run generation code"):
        pair.compiled.load_custom_generate(tmp_path, trust_remote_code=True)
    captured = preset_pair("tiny-qwen3").captured
    generation_config_of(captured, CheckpointFiles(tmp_path, {}, {}))
    assert not mark.exists()
    assert answers.tell() == 0


def test_a_function_of_the_callers_own_generates(pair: Both) -> None:
    def generate(model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return input_ids + 1

    ids = prompt(4)["input_ids"]
    options = {"custom_generate": generate, "trust_remote_code": False}
    output = pair.compiled.generate(ids, max_new_tokens=1, **options)
    assert torch.equal(output, ids + 1)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' + "[" * 300 + "]" * 300 + "}", "[]", "{", "\0"]
)
def test_broken_generation_configurations(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    captured = preset_pair("tiny-qwen3").captured
    with pytest.raises(tpcompile.CheckpointError, match=r"cannot be read.*JSON"):
        generation_config_of(captured, CheckpointFiles(tmp_path, {}, {}))


def test_a_configuration_and_a_seed_generate_too() -> None:
    config = AutoConfig.for_model(**{**preset("tiny-qwen2"), "initializer_range": 0.3})
    with tpcompile.compile(config, tp=2, random_weights=3, simulate=True) as model:
        Both(pair_of(config, 3).eager, model).same(prompt(4)["input_ids"], max_new_tokens=8)


def test_loading_and_generating_leave_random_numbers_alone() -> None:
    """Random state is unchanged, so a seed set before `compile` gives eager's text."""
    eager = AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset("tiny-qwen3"))).eval()
    state = torch.get_rng_state()
    with tpcompile.compile(eager, tp=2, simulate=True) as model:
        model.generate(prompt(4)["input_ids"], max_new_tokens=2, pad_token_id=PAD)
    assert torch.equal(torch.get_rng_state(), state)


BROKEN: dict[str, bytes] = {
    "invalid JSON": b"{",
    "a list": b"[]",
    "a number": b"3",
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "another type": b'{"max_new_tokens": "many"}',
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_generation_config_is_named(tmp_path: Any, broken: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(BROKEN[broken])
    captured = preset_pair("tiny-qwen3").captured
    with pytest.raises(tpcompile.CheckpointError, match=r"generation_config\.json.*remove it"):
        generation_config_of(captured, CheckpointFiles(tmp_path, {}, {}))


def test_a_configuration_without_sampling_has_the_special_tokens() -> None:
    stated = GenerationConfig(eos_token_id=[3, 4], pad_token_id=1, temperature=0.5, top_k=3)
    settings = without_sampling(stated).to_diff_dict()
    assert settings == GenerationConfig(eos_token_id=[3, 4], pad_token_id=1).to_diff_dict()
