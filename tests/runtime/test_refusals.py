"""Other uses of Hugging Face's models work, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpcompile
from tests.runtime.eager_pair import PAD, Both, lively, tiny_both

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def pair() -> Both:
    return tiny_both()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "get_parameter": (lambda model: model.get_parameter("model.norm.weight"), "gather_weight"),
    "get_input_embeddings": (lambda model: model.get_input_embeddings(), "state_dict"),
    "get_output_embeddings": (lambda model: model.get_output_embeddings(), "state_dict"),
    "set_input_embeddings": (
        lambda model: model.set_input_embeddings(torch.nn.Embedding(3, 4)),
        "Change the model before",
    ),
    "set_output_embeddings": (lambda model: model.set_output_embeddings(None), "Change the model"),
    "resize_token_embeddings": (lambda model: model.resize_token_embeddings(9), "Change the model"),
    "load_adapter": (lambda model: model.load_adapter("x"), "Change the model before"),
    "load_state_dict": (lambda model: model.load_state_dict({}), "with the new weights"),
    "train": (lambda model: model.train(), "without gradients"),
    "requires_grad_": (lambda model: model.requires_grad_(), "without gradients"),
    "push_to_hub": (lambda model: model.push_to_hub("x"), "save_pretrained"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_compiled_model_does_not_have(pair: Both, name: str) -> None:
    call, hint = REFUSED[name]
    with pytest.raises(tpcompile.UnsupportedError, match=rf"does not support {name}\(\).*{hint}"):
        call(pair.compiled)
    assert pair.compiled(IDS).logits.shape == (1, 4, 1013)


def test_what_changes_nothing_is_allowed(pair: Both) -> None:
    model = pair.compiled
    assert model.train(False) is model.eval() is model.requires_grad_(False) is model
    assert not model.training


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
@pytest.mark.parametrize(
    "move", [lambda model: model.to("cuda"), lambda model: model.cuda()], ids=["to", "cuda"]
)
def test_a_device_that_is_not_there(pair: Both, move: Callable[[Any], Any]) -> None:
    with pytest.raises(tpcompile.UsageError, match=r"cannot be moved.*float32 on cpu"):
        move(pair.compiled)
    assert pair.compiled.to("cpu") is pair.compiled.cpu() is pair.compiled


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_the_number_of_parameters(pair: Both, exclude: bool, trainable: bool) -> None:
    expected, actual = (model.num_parameters(trainable, exclude) for model in pair.each())
    assert actual == expected


def test_the_number_of_parameters_that_are_not_tied_and_partly_frozen() -> None:
    eager = lively("tiny-qwen2", tie_word_embeddings=False)
    eager.lm_head.requires_grad_(False)
    with tpcompile.compile(eager) as model:
        for trainable in (False, True):
            for exclude in (False, True):
                expected = eager.num_parameters(trainable, exclude)
                assert model.num_parameters(trainable, exclude) == expected


COMPILED: dict[str, Callable[[Any], Any]] = {
    "the model": lambda model: torch.compile(model, backend="eager")(IDS).logits,
    "its forward": lambda model: torch.compile(model.forward, backend="eager")(IDS).logits,
    "around it": lambda model: torch.compile(lambda x: model(x).logits, backend="eager")(IDS),
}


@pytest.mark.parametrize("way", COMPILED)
def test_torch_compile_leaves_it_alone(pair: Both, way: str) -> None:
    logits = COMPILED[way](pair.compiled)
    assert torch.equal(logits, pair.compiled(IDS).logits)


def test_torch_compile_generates(pair: Both) -> None:
    options = {"max_new_tokens": 3, "pad_token_id": PAD}
    expected = pair.same(IDS, **options)
    assert (
        torch.compile(pair.compiled, backend="eager").generate(IDS, **options).tolist() == expected
    )


def test_assistants_on_either_side(pair: Both) -> None:
    eager, compiled = pair.eager, pair.compiled
    expected = pair.same(IDS, max_new_tokens=4, do_sample=False)
    for model, assistant in ((compiled, eager), (eager, compiled), (compiled, compiled)):
        tokens = model.generate(
            IDS, assistant_model=assistant, max_new_tokens=4, do_sample=False, pad_token_id=PAD
        )
        assert tokens.tolist() == expected
