"""Methods of Hugging Face's models that a compiled model refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tpcompile.errors import UnsupportedError

_NO_MODULES = (
    "its weights are on the ranks, and there are no modules here",
    "Call model.state_dict() for all weights, model.gather_weight(name) for one of them",
)
_FIXED = (
    "it stays as it was compiled",
    "Change the model first, and compile it then",
)
NO_GRADIENTS = (
    "it only runs forward, without gradients",
    "Train the model before it is compiled",
)
_NO_LOADING = (
    "its ranks have read their weights",
    "Compile the model that has those weights",
)
_NO_HUB = ("it knows no hub", "Call save_pretrained(DIR), and push the directory")


def refusal(name: str, why: tuple[str, str]) -> UnsupportedError:
    """What a call of the method says."""
    reason, instead = why
    return UnsupportedError(f"A compiled model has no {name}(): {reason}", hint=instead)


def _refused(name: str, why: tuple[str, str]) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise refusal(name, why)

    return refuse


class Refusals:
    """Each of these would find an empty module here, and answer without an error.

    `parameters()` stays, and is empty: Hugging Face's code looks through it for devices.
    """

    get_parameter = _refused("get_parameter", _NO_MODULES)
    get_input_embeddings = _refused("get_input_embeddings", _NO_MODULES)
    get_output_embeddings = _refused("get_output_embeddings", _NO_MODULES)
    set_input_embeddings = _refused("set_input_embeddings", _FIXED)
    set_output_embeddings = _refused("set_output_embeddings", _FIXED)
    resize_token_embeddings = _refused("resize_token_embeddings", _FIXED)
    load_adapter = _refused("load_adapter", _FIXED)
    add_adapter = _refused("add_adapter", _FIXED)
    gradient_checkpointing_enable = _refused("gradient_checkpointing_enable", NO_GRADIENTS)
    enable_input_require_grads = _refused("enable_input_require_grads", NO_GRADIENTS)
    load_state_dict = _refused("load_state_dict", _NO_LOADING)
    _load_from_state_dict = _refused("load_state_dict", _NO_LOADING)
    push_to_hub = _refused("push_to_hub", _NO_HUB)
