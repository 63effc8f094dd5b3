"""lm-evaluation-harness gives the server the scores of the model in process."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.runtime.test_lm_eval import KINDS, TOLERANCE, _flat, scored
from tests.serving.conftest import KEY, Served


class Completions(LocalCompletionsAPI):  # type: ignore[misc]
    """The harness' client for completions, with the server's key."""

    @property
    def api_key(self) -> str:
        return KEY


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("concurrent", [1, 4])
def test_the_scores_are_those_of_the_model(
    served: Served, tmp_path: Path, kind: str, concurrent: int
) -> None:
    served.tokenizer.save_pretrained(tmp_path)
    wanted = scored(HFLM(pretrained=served.eager, tokenizer=served.tokenizer), kind)
    harness = Completions(
        base_url=f"{served.url}/v1/completions",
        model="demo",
        tokenizer=str(tmp_path),
        max_length=127,
        num_concurrent=concurrent,
    )
    actual = scored(harness, kind)
    assert actual[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    for ours, theirs in zip(_flat(actual[1]), _flat(wanted[1]), strict=True):
        assert ours == (pytest.approx(theirs, rel=TOLERANCE) if isinstance(ours, float) else theirs)
