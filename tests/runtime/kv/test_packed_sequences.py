"""Several sequences packed into a row are separated by their positions, as in Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

import tpcompile
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import Both, enlivened, prompt
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.presets import preset
from tpcompile.runtime.cache_name import CACHE

VOCABULARY = 128


def lively(**changes: Any) -> Any:
    values = {**preset("tiny-qwen3"), "dtype": "float32", "num_hidden_layers": 2, **changes}
    return enlivened(AutoConfig.for_model(**{**values, "vocab_size": VOCABULARY}))


@pytest.fixture(scope="module", params=[1, 2])
def pair(request: pytest.FixtureRequest) -> Both:
    """Provide models with a window of 3 in layer 0 and without a window in layer 1."""
    eager = lively(
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )
    compiled = tpcompile.compile(
        eager, tp=request.param, simulate=True, max_seq_len=32, max_batch=2
    )
    return Both(eager, compiled)


def _ids(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, VOCABULARY, (rows, columns), generator=generator)


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits


def _difference(pair: Both, **inputs: Any) -> float:
    return relative_error(_logits(pair.compiled, **inputs), _logits(pair.eager, **inputs))


LAYOUTS = {
    "two": [[0, 1, 2, 3, 0, 1, 2, 3, 4]],
    "one": [[0, 1, 2, 3, 4, 5, 6, 7, 8]],
    "one, with an offset": [[5, 6, 7, 8, 9, 10, 11, 12, 13]],
    "repeated": [[0, 0, 0, 1, 2, 2, 3, 3, 3]],
    "jumping": [[0, 1, 2, 7, 8, 9, 11, 12, 13]],
    "decreasing": [[8, 7, 6, 5, 4, 3, 2, 1, 0]],
    "continued from a later position": [[3, 4, 5, 6, 7, 1, 2, 3, 4]],
    "two rows": [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]],
    "only one of two rows": [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 0, 0, 1]],
    "rows with consecutive positions": [[0, 1, 2, 3, 4, 0, 1, 2, 3], [4, 5, 6, 7, 8, 0, 1, 2, 3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_rows(pair: Both, attention: str, layout: str) -> None:
    positions = torch.tensor(LAYOUTS[layout])
    inputs = {"input_ids": _ids(*positions.shape), "position_ids": positions, "use_cache": False}
    pair.eager.set_attn_implementation(attention)
    assert _difference(pair, **inputs) < TOLERANCE


def test_one_row_of_positions_for_the_whole_batch(pair: Both) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert _difference(pair, input_ids=_ids(2, 5), position_ids=positions, use_cache=False) < (
        TOLERANCE
    )


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4, -1])])
def test_only_the_logits_asked_for(pair: Both, keep: int | torch.Tensor) -> None:
    positions = torch.tensor(LAYOUTS["two rows"])
    inputs = {"input_ids": _ids(2, 9), "position_ids": positions, "use_cache": False}
    assert _difference(pair, **inputs, logits_to_keep=keep) < TOLERANCE


KEPT_WHOLE: dict[str, dict[str, Any]] = {
    "the default use_cache": {},
    "use_cache": {"use_cache": True},
    "a mask of ones": {"use_cache": False, "attention_mask": torch.ones(1, 9)},
    "both": {"attention_mask": torch.ones(1, 9, dtype=torch.long)},
}


@pytest.mark.parametrize("case", KEPT_WHOLE)
def test_rows_that_are_kept_whole(pair: Both, case: str) -> None:
    """Rows with a mask or a cache are not separated, although their positions restart."""
    positions = torch.tensor(LAYOUTS["two"])
    inputs = {"input_ids": _ids(1, 9), "position_ids": positions}
    logits = _logits(pair.compiled, **inputs, **KEPT_WHOLE[case])
    assert relative_error(logits, _logits(pair.eager, **inputs, **KEPT_WHOLE[case])) < TOLERANCE
    assert relative_error(logits, _logits(pair.compiled, **inputs, use_cache=False)) > 0.01


def test_a_cache_that_is_given_keeps_rows_whole(pair: Both) -> None:
    ids = _ids(1, 9)
    positions = torch.tensor([[0, 1, 0]])
    with torch.inference_mode():
        logits = [
            model(
                ids[:, 6:],
                position_ids=positions,
                use_cache=False,
                **{CACHE: model(ids[:, :6], use_cache=True)[CACHE]},
            ).logits
            for model in (pair.compiled, pair.eager)
        ]
    assert relative_error(*logits) < TOLERANCE


def test_use_cache_of_the_config(pair: Both) -> None:
    positions = torch.tensor(LAYOUTS["two"])
    inputs = {"input_ids": _ids(1, 9), "position_ids": positions}
    split = _logits(pair.compiled, **inputs, use_cache=False)
    try:
        pair.eager.config.use_cache = False
        assert pair.compiled.config is pair.eager.config
        assert _difference(pair, **inputs) < TOLERANCE
        assert torch.equal(_logits(pair.compiled, **inputs), split)
    finally:
        pair.eager.config.use_cache = True


def test_masks_in_four_dimensions_are_refused(pair: Both) -> None:
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(UnsupportedError, match="attention_mask of query-key pairs"):
        pair.compiled(_ids(1, 9), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_free_is_the_padded_batch(pair: Both, attention: str) -> None:
    """Left-padded rows equal a flat row without padding, as in transformers' own tests."""
    pair.eager.set_attn_implementation(attention)
    inputs = {name: value % VOCABULARY for name, value in prompt(4, 7).items()}
    real = inputs["attention_mask"].bool()
    positions = (real.cumsum(1) - 1).clamp(min=0)
    flat = {"input_ids": inputs["input_ids"][real][None], "position_ids": positions[real][None]}
    padded = _logits(pair.compiled, **inputs, position_ids=positions, use_cache=False)[real]
    logits = _logits(pair.compiled, **flat, use_cache=False)[0]
    assert relative_error(logits, padded) < TOLERANCE
    assert relative_error(logits, _logits(pair.eager, **flat, use_cache=False)[0]) < TOLERANCE


def test_neither_max_batch_nor_the_cache_limits_packed_sequences(pair: Both) -> None:
    """Nine sequences in each of two rows run with `max_batch=2`, and free all their blocks."""
    positions = torch.tensor(LAYOUTS["decreasing"]).expand(2, -1)
    inputs = {"position_ids": positions, "use_cache": False}
    assert _difference(pair, input_ids=_ids(2, 9), **inputs) < TOLERANCE
    assert pair.compiled._pool is not None and pair.compiled._pool.used == 0
    with pytest.raises(UsageError, match="max_batch"):
        pair.compiled(_ids(3, 9), position_ids=positions[:1], use_cache=False)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_is_not_affected(pair: Both, use_cache: bool) -> None:
    """`generate` always passes a mask, so a prompt is not separated, whatever its positions."""
    pair.eager.set_attn_implementation("eager")
    ids = _ids(1, 6)
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
    pair.same(ids, **options)
    pair.same(ids, **options, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


class _NeverApart(Qwen3Model):
    """Model that creates masks without positions, so that eager does not separate sequences."""

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        del options["attention_mask"], options["inputs_embeds"]
        mask = create_causal_mask(self.config, hidden, attention_mask=None, **{CACHE: None})
        return super().forward(
            inputs_embeds=hidden,
            position_ids=position_ids,
            attention_mask={"full_attention": mask},
            **options,
        )


def test_a_model_that_never_packs_is_not_split() -> None:
    eager = lively()
    eager.model.__class__ = _NeverApart
    pair = Both(eager, tpcompile.compile(eager, tp=1, simulate=True))
    positions = torch.tensor(LAYOUTS["two"])
    inputs = {"input_ids": _ids(1, 9), "position_ids": positions, "use_cache": False}
    assert _difference(pair, **inputs) < TOLERANCE
