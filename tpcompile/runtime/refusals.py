"""Methods of Hugging Face's models that raise on a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tpcompile.errors import UnsupportedError

_NO_MODULES = (
    "its modules and weights are on the ranks",
    "Call model.state_dict() for all weights, or model.gather_weight(name) for one",
)
_FIXED = (
    "it cannot change after it was compiled",
    "Change the model before you compile it",
)
NO_GRADIENTS = (
    "it only runs the forward pass, without gradients",
    "Train the model before you compile it",
)
_NO_LOADING = (
    "its ranks have already loaded their weights",
    "Compile a model with the new weights",
)
_NO_HUB = ("it cannot upload to a hub", "Call save_pretrained(DIR), and push the directory")


def refusal(name: str, why: tuple[str, str]) -> UnsupportedError:
    """Return the error that a call of the method raises, from (reason, alternative)."""
    reason, hint = why
    return UnsupportedError(f"A compiled model does not support {name}(): {reason}", hint=hint)


def _refused(name: str, why: tuple[str, str]) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise refusal(name, why)

    return refuse


class Refusals:
    """Methods that raise; the inherited ones would silently work on an empty module.

    `parameters()` still works and is empty: Hugging Face's code iterates over it to find devices.
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
