"""On all ranks, each layer's attention and MLP give the values of Hugging Face's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.models import TOLERANCE, Pair, batch, padded, preset_pair, relative_error, run, whole
from tests.stages import graph_after
from tpcompile.ir.meta import origin_of, type_of
from tpcompile.ir.ops import ALL_REDUCE
from tpcompile.ir.types import REPLICATE, ValueType
from tpcompile.passes import default_pipeline

LENGTHS = (4, 33, 11)
CASES = [
    ("qwen2.5-0.5b", 4),  # 14 query heads on 4 ranks, 2 KV heads
    ("qwen2.5-7b", 6),  # 28 on 6, 4 KV heads
    ("qwen2.5-72b", 8),
    ("qwen3-0.6b", 3),  # 16 on 3, 8 KV heads
    ("qwen3-14b", 7),  # 40 on 7
    ("qwen3-32b", 2),
]


def _eager_parts(pair: Pair) -> dict[str, torch.Tensor]:
    """Return the results of the eager attentions and MLPs by module, for real tokens only."""
    parts: dict[str, torch.Tensor] = {}
    hooks = []
    ids, mask = padded(LENGTHS)

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            parts[name] = value[mask.bool()]

        return hook

    for layer in pair.eager.model.layers:
        number = layer.self_attn.layer_idx
        hooks += [
            layer.self_attn.register_forward_hook(keep(f"model.layers.{number}.self_attn.o_proj")),
            layer.mlp.register_forward_hook(keep(f"model.layers.{number}.mlp.down_proj")),
        ]
    with torch.inference_mode():
        pair.eager(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return parts


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_attention_and_mlp_of_every_layer(name: str, tp: int) -> None:
    pair = preset_pair(name)
    gm = graph_after(pair, default_pipeline(tp))
    values = run(gm, pair, batch(LENGTHS))
    sums = {origin_of(n).module: n for n in gm.graph.nodes if n.target is ALL_REDUCE}
    expected = _eager_parts(pair)
    assert len(expected) == 2 * pair.captured.config.num_hidden_layers
    for module, part in expected.items():
        assert relative_error(whole(sums[module], values), part) < TOLERANCE, module


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_ranks_agree_on_every_replicated_value(name: str, tp: int) -> None:
    pair = preset_pair(name)
    gm = graph_after(pair, default_pipeline(tp))
    values = run(gm, pair, batch(LENGTHS))
    replicated = [node for node in gm.graph.nodes if _is_replicated(node)]
    assert len(replicated) > 20
    for node in replicated:
        first, *other_values = values[node]
        for other in other_values:
            assert torch.equal(first, other), node.name


def _is_replicated(node: fx.Node) -> bool:
    kind = type_of(node) if "type" in node.meta else None
    return isinstance(kind, ValueType) and kind.placement == REPLICATE
