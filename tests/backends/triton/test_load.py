"""Tests of loading: Triton missing or too old, and both modes in one process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import triton

import tpcompile
from tests.backends.reference.step_models import FEW_TOKENS
from tests.backends.reference.stepping import Case, steps_of, steps_on
from tests.models import relative_error
from tpcompile.backends.triton import Triton, load
from tpcompile.backends.triton.ahead import compile_ahead
from tpcompile.errors import UnsupportedError

CASE = Case(FEW_TOKENS, lengths=(3,))


def _import_instead(monkeypatch: pytest.MonkeyPatch, replacement: Any) -> None:
    """Let the loader import `replacement` as Triton, or nothing."""

    def import_module(name: str) -> Any:
        if name != "triton":
            return importlib.import_module(name)
        if replacement is None:
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return replacement

    monkeypatch.setattr(load, "importlib", SimpleNamespace(import_module=import_module))


def test_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling names the package, before any weight is read."""
    _import_instead(monkeypatch, None)
    with pytest.raises(UnsupportedError, match=r"needs the package triton.*tpcompile\[triton\]"):
        tpcompile.compile(CASE.pair.eager, backend="triton")
    with pytest.raises(UnsupportedError, match="needs the package triton"):
        compile_ahead(CASE.program, "sm_90")


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _import_instead(monkeypatch, SimpleNamespace(__version__="3.5.1"))
    with pytest.raises(UnsupportedError, match=r"newer Triton.*3\.5\.1.*3\.6 or newer"):
        tpcompile.compile(CASE.pair.eager, backend="triton")


def test_interpreted_and_compiled_in_turn() -> None:
    """The interpreter leaves Triton as it was, and compiled tiles leave the interpreted ones."""
    before = {name: getattr(triton.language, name) for name in ("sum", "zeros", "load")}
    for compiled in (False, True, False):
        if compiled:
            assert compile_ahead(CASE.program, "sm_90").registers > 0
        else:
            (logits,) = steps_on(Triton(CASE.memory()), CASE, 1)
            assert relative_error(logits, steps_of(CASE, 1)[0]) < 1e-5
        assert {name: getattr(triton.language, name) for name in before} == before
    assert triton.knobs.runtime.interpret is False


def test_triton_is_imported_only_where_it_is_used() -> None:
    """The emitter and the executor are imported without it."""
    code = (
        "import sys; sys.modules['triton'] = None; import tpcompile.backends.triton.ahead; "
        "import tpcompile.backends.triton"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
