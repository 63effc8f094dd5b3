"""Hugging Face's `generate_batch` on a compiled model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import tpcompile
from tests import scripts
from tests.runtime.eager_pair import lively
from tests.serving.test_engine import alone, prompt

PROMPTS = [prompt(Random(n), n) for n in (1, 40, 7, 130, 33)]


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as compiled:
        yield compiled


def test_prompts_of_any_lengths(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=False)
    outputs = model.generate_batch(PROMPTS, generation_config=config, eos_token_id=None)
    assert list(outputs) == [f"req_{n}" for n in range(len(PROMPTS))]
    for tokens, output in zip(PROMPTS, outputs.values(), strict=True):
        assert output.prompt_ids == tokens and output.is_finished() and output.error is None
        assert output.generated_tokens == alone(model, tokens, 9)


def test_sampling_follows_torch_s_seed(model: Any) -> None:
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2, "top_k": 0}
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        answers = model.generate_batch(PROMPTS[:2], **options, record_timestamps=True)
        runs.append({name: output.generated_tokens for name, output in answers.items()})
    assert runs[0] == runs[1] and list(runs[0]) == ["req_0", "req_0#1", "req_1", "req_1#1"]
    assert len(answers["req_0"].timestamps) == len(answers["req_0"].generated_tokens)
    assert runs[0]["req_0"] != runs[0]["req_0#1"]


def test_log_probabilities(model: Any) -> None:
    outputs = model.generate_batch(PROMPTS[:1], max_new_tokens=3, output_logits=True)
    output = outputs["req_0"]
    assert len(output.logprobs) == len(output.generated_tokens) and max(output.logprobs) <= 0


def test_what_is_not_supported(model: Any) -> None:
    with pytest.raises(tpcompile.UnsupportedError, match="num_beams=3"):
        model.generate_batch(PROMPTS[:1], num_beams=3)
    with pytest.raises(tpcompile.UsageError, match="the argument sparkle"):
        model.generate_batch(PROMPTS[:1], sparkle=1)


_SCRIPT = """\
import torch.distributed as dist
import tpcompile

model = tpcompile.compile("preset:tiny-qwen3", random_weights=3, max_seq_len=96)
first = model.generate_batch([[1, 2, 3], [4] * 40], max_new_tokens=5)
try:
    model.generate_batch([[1]], num_beams=2)
    refused = ""
except tpcompile.UnsupportedError as error:
    refused = error.message
again = model.generate_batch([[1, 2, 3]], max_new_tokens=5)
answer = [[output.generated_tokens for output in (*first.values(), *again.values())], refused]
every = [None] * model.tp
dist.all_gather_object(every, answer)
if dist.get_rank() == 0:
    print(every)
"""


def test_under_torchrun_every_process_gets_the_result(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ran = scripts.run([str(script)], ranks=2)
    assert ran.returncode == 0, ran.stderr
    (first, refused), *other_ranks = ast.literal_eval(ran.stdout)
    assert other_ranks == [[first, refused]]
    assert "num_beams=2" in refused
    with tpcompile.compile("preset:tiny-qwen3", random_weights=3, max_seq_len=96) as model:
        outputs = model.generate_batch([[1, 2, 3], [4] * 40], max_new_tokens=5)
    assert first == [*(output.generated_tokens for output in outputs.values()), first[0]]
