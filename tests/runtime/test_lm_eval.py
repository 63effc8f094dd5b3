"""lm-evaluation-harness gives a compiled model the scores of Hugging Face eager."""

from __future__ import annotations

from typing import Any

import datasets
import lm_eval
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

import tpcompile
from tests.runtime.eager_pair import Both, lively, steps
from tpcompile.demo.model import demo_tokenizer
from tpcompile.demo.text import all_sentences

ROWS = 8
TOLERANCE = 1e-4
"""For log-probabilities, which the harness adds up over a text."""


@pytest.fixture(scope="module")
def pair() -> Both:
    tokens = demo_tokenizer()
    settings = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    eager = lively("tiny-qwen3", vocab_size=len(tokens), bos_token_id=None, **settings)
    return Both(eager, tpcompile.compile(eager, tp=2, simulate=True))


def _rows() -> list[dict[str, Any]]:
    """Return sentences of the demo's training set, with a choice of last words."""
    sentences = all_sentences()
    words = [text.split() for text in sentences[:: len(sentences) // ROWS][:ROWS]]
    assert len({sentence[-1] for sentence in words}) == ROWS
    return [
        {
            "text": " ".join(sentence),
            "question": " ".join(sentence[:-1]),
            "choices": [other[-1] for other in (sentence, words[index - 1], words[index - 2])],
        }
        for index, sentence in enumerate(words)
    ]


KINDS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metrics": ("acc", "acc_norm"),
    },
    "loglikelihood": {
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{choices[0]}}",
        "metrics": ("acc", "perplexity"),
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metrics": ("word_perplexity", "bits_per_byte"),
    },
    "generate_until": {
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metrics": ("exact_match",),
    },
}


def _task(kind: str) -> ConfigurableTask:
    settings = dict(KINDS[kind])
    metrics = settings.pop("metrics")
    return ConfigurableTask(
        config={
            "task": kind,
            "output_type": kind,
            "dataset_path": "none",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(_rows())},
            "test_split": "test",
            "metric_list": [{"metric": metric} for metric in metrics],
            **settings,
        }
    )


def scored(harness: Any, kind: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the metrics of a kind of task, and the answers in the order of the documents."""
    report = lm_eval.evaluate(harness, {kind: _task(kind)}, bootstrap_iters=0)
    scores = report["results"][kind]
    numbers = {
        name: score
        for name, score in scores.items()
        if name.partition(",")[0] in KINDS[kind]["metrics"]
    }
    answers = sorted(report["samples"][kind], key=lambda sample: int(sample["doc_id"]))
    return numbers, [sample["resps"] for sample in answers]


def _scored(model: Any, kind: str) -> tuple[dict[str, Any], list[Any]]:
    return scored(HFLM(pretrained=model, tokenizer=demo_tokenizer(), batch_size=3), kind)


def _flat(answer: Any) -> list[Any]:
    nested = isinstance(answer, list | tuple)
    return [part for item in answer for part in _flat(item)] if nested else [answer]


@pytest.mark.parametrize("kind", KINDS)
def test_the_scores_are_those_of_eager(pair: Both, kind: str) -> None:
    expected, expected_answers = _scored(pair.eager, kind)
    with steps(pair.compiled) as recorded:
        scores, answers = _scored(pair.compiled, kind)
    assert recorded
    assert set(scores) == {f"{metric},none" for metric in KINDS[kind]["metrics"]}
    assert scores == pytest.approx(expected, rel=TOLERANCE)
    for ours, theirs in zip(_flat(answers), _flat(expected_answers), strict=True):
        assert ours == (pytest.approx(theirs, rel=TOLERANCE) if isinstance(ours, float) else theirs)


def test_greedy_text_is_made_of_tokens(pair: Both) -> None:
    with steps(pair.compiled) as recorded:
        _scored(pair.compiled, "generate_until")
    assert {step.output for step in recorded} == {"tokens"}
