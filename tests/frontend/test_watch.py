"""Tests of models whose layer loop does more than call the layers in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from tests.models import TOLERANCE, padded, relative_error, scaled_config
from tpcompile import compile as compiled
from tpcompile.errors import UnsupportedError
from tpcompile.frontend import capture
from tpcompile.frontend.layers import find_layers
from tpcompile.frontend.watch import watch_layers
from tpcompile.runtime.cache_name import CACHE


def _model(layers: int = 6) -> Any:
    torch.manual_seed(0)
    config = scaled_config("qwen3-0.6b", num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _assert_as_eager(model: Any) -> None:
    ids, mask = padded((5, 9))
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
    with compiled(model, tp=2, simulate=True, backend="torch") as sharded:
        logits = sharded(ids, attention_mask=mask).logits[mask.bool()]
    assert relative_error(logits, expected) < TOLERANCE


def test_a_plain_loop_keeps_its_kinds() -> None:
    model = _model()
    assert watch_layers(model, find_layers(model)).kinds == (0,) * 6


def _causal(model: Any, hidden: torch.Tensor) -> Any:
    return create_causal_mask(model.config, hidden, attention_mask=None, **{CACHE: None})


class _OtherTables(Qwen3Model):
    """Model that gives layer 4 the rotary tables of other positions."""

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        tables = self.rotary_emb(hidden, position_ids)
        doubled = self.rotary_emb(hidden, position_ids * 2)
        for number, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                attention_mask=_causal(self, hidden),
                position_embeddings=doubled if number == 4 else tables,
                **{k: v for k, v in options.items() if k == "starts"},
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_a_layer_that_is_given_something_else_is_of_another_kind() -> None:
    model = _model()
    model.model.__class__ = _OtherTables
    assert watch_layers(model, find_layers(model)).kinds == (0, 0, 0, 0, 1, 0)
    stamped, full = capture(model), capture(model, stamped=False)
    assert [str(n.args) for n in stamped.graph.graph.nodes] == [
        str(n.args) for n in full.graph.graph.nodes
    ]


class _Faded(Qwen3Model):
    """Model that scales the residual between layers."""

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        tables = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            mask = _causal(self, hidden)
            hidden = layer(hidden, attention_mask=mask, position_embeddings=tables) * 0.9
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_something_between_layers_is_refused() -> None:
    model = _model()
    model.model.__class__ = _Faded
    with pytest.raises(UnsupportedError, match="between its layers"):
        capture(model)


@pytest.mark.parametrize("layer", [0, 1, 3, 5])
def test_a_hook_on_one_layer_is_part_of_it(layer: int) -> None:
    model = _model()
    model.model.layers[layer].mlp.register_forward_hook(lambda _, __, out: out * 1.5)
    _assert_as_eager(model)
