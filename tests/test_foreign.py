"""Arguments of other libraries are refused by a sentence that names ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tpcompile
from tpcompile.errors import UsageError
from tpcompile.foreign import _INSTEAD

ARGUMENTS: dict[str, tuple[Any, str]] = {
    "torch_dtype": ("auto", "has no argument torch_dtype.*Pass dtype instead"),
    "device_map": ("auto", "has no argument device_map.*Pass device="),
    "load_in_4bit": (True, 'weights="int4"'),
    "tensor_parallel_size": (2, "Pass tp"),
    "max_model_len": (2048, "Pass max_seq_len"),
    "trust_remote_code": (True, "never runs"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("function", [tpcompile.compile, tpcompile.capture])
def test_the_sentence_names_our_argument(function: Any, name: str) -> None:
    value, message = ARGUMENTS[name]
    with pytest.raises(UsageError, match=message):
        function("preset:tiny-qwen3", **{name: value})


def test_sentences_name_arguments_that_exist() -> None:
    ours = inspect.signature(tpcompile.compile).parameters
    assert not ours.keys() & _INSTEAD.keys()
    for name in ("dtype", "device", "tp", "weights", "kv", "max_seq_len"):
        assert name in ours and any(name in message for message in _INSTEAD.values())


def test_other_names_are_errors_of_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_chache'"):
        tpcompile.compile("preset:tiny-qwen3", use_chache=True)  # type: ignore[call-arg]
