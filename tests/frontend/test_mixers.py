"""The copy of a gated delta net that is traced calls ops; Hugging Face's module stays as it is."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

from tests.hybrids import FAMILIES, lively_hybrid, random_config
from tests.models import TOLERANCE, relative_error
from tpcompile.errors import UnsupportedError
from tpcompile.frontend.mixers import CONV, forward_with, function_of, is_linear_attention, with_ops


@pytest.fixture(scope="module", params=FAMILIES)
def net(request: pytest.FixtureRequest) -> Any:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2}
    config = random_config(0, request.param, **linear, **layers)
    return lively_hybrid(config).model.layers[0].linear_attn


def traced(net: Any) -> Any:
    copied = copy.deepcopy(net)
    with_ops(copied)
    return copied


def test_the_ops_give_the_results_of_the_functions(net: Any) -> None:
    x = torch.randn(1, 70, 32)
    with torch.inference_mode():
        output = traced(net)(x, starts=torch.tensor([0, 70]))
        assert relative_error(output, net(x)) < TOLERANCE
        apart = traced(net)(x, starts=torch.tensor([0, 30, 70]))
        alone = torch.cat([net(part) for part in x.split((30, 40), 1)], 1)
    assert relative_error(apart, alone) < TOLERANCE
    assert relative_error(apart, output) > TOLERANCE


def test_nothing_of_hugging_face_is_changed(net: Any) -> None:
    kind = type(net)
    module = sys.modules[kind.__module__]
    before = dict(vars(module)), kind.forward
    copied = traced(net)
    assert (dict(vars(module)), kind.forward) == before
    assert "forward" in vars(copied) and "forward" not in vars(net)


def test_a_forward_with_another_function(net: Any) -> None:
    """A function that is wrapped sees the calls of the forward, which returns the same."""
    shapes = []
    convolution = function_of(net, CONV)

    def shown(*args: Any, **options: Any) -> Any:
        shapes.append(args[0].shape)
        return convolution(*args, **options)

    x = torch.randn(1, 5, 32)
    with torch.inference_mode():
        assert torch.equal(forward_with(net, {CONV: shown})(x), net(x))
    assert shapes == [(1, net.conv_dim, 5)]
    assert "forward" not in vars(net) and function_of(net, CONV) is convolution


def test_only_gated_delta_nets_are_found(net: Any) -> None:
    assert is_linear_attention(net)
    assert not is_linear_attention(net.norm) and not is_linear_attention(torch.nn.Linear(2, 2))


def test_another_activation_and_steps_are_refused(net: Any) -> None:
    x = torch.randn(1, 3, 32)
    other = traced(net)
    other.activation = "gelu"
    with pytest.raises(UnsupportedError, match="applies gelu after its convolution"):
        other(x, starts=torch.tensor([0, 3]))
    namespace = vars(traced(net))["forward"].__func__.__globals__
    for name in ("causal_conv1d_update", "torch_recurrent_gated_delta_rule"):
        with pytest.raises(UnsupportedError, match="a step of one token while it is traced"):
            namespace[name](x)
    values = torch.randn(1, 3, 2, 4)
    with pytest.raises(UnsupportedError, match="does not normalise its queries and keys"):
        namespace["torch_chunk_gated_delta_rule"](values, values, values, g=values, beta=values)
