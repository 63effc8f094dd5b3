"""Loading of generated kernels, to be compiled for a GPU or run by Triton's interpreter."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tpcompile.backends.triton.emit import TILES
from tpcompile.errors import UnsupportedError

LEAST_VERSION = (3, 6)
_INTERPRETED = "tpcompile_interpreted_tiles"
"""The name under which the tile bodies are imported a second time, for the interpreter."""


def triton() -> Any:
    """Import Triton; raise if it is missing or too old."""
    try:
        module = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "The triton backend needs the package triton",
            hint='Run `pip install "tpcompile[triton]"`, or choose another backend',
        ) from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < LEAST_VERSION:
        raise UnsupportedError(
            "The triton backend needs a newer Triton",
            got=module.__version__,
            expected=f"{'.'.join(map(str, LEAST_VERSION))} or newer",
        )
    return module


def tiles_package(interpret: bool) -> str:
    """Import the tile bodies for one mode; return the name of their package."""
    name = _INTERPRETED if interpret else TILES
    if name not in sys.modules:
        with _mode(interpret):
            _import_as(name)
        if interpret:
            for module in [m for n, m in sys.modules.items() if n.startswith(f"{name}.")]:
                _call_directly(module)
    return name


def load_kernels(source: str, interpret: bool) -> ModuleType:
    """Return the module of a generated source, with the kernels `megakernel` and `together`."""
    name = f"<tpcompile kernel {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = ModuleType("tpcompile_kernel")
    with _mode(interpret):
        exec(compile(source, name, "exec"), module.__dict__)
    if interpret:
        kernels = {name: module.__dict__[name] for name in ("megakernel", "together")}
        _call_directly(module)
        vars(module).update(kernels)
        # A launch replaces the functions of `triton.language` and `core` by those of the
        # interpreter, if it finds these modules here.
        module.__dict__["core"] = importlib.import_module("triton.language").core
    return module


def _mode(interpret: bool) -> AbstractContextManager[None]:
    """Let `triton.jit` make functions for the interpreter, or for a GPU."""
    return set_knob(triton().knobs.runtime, "interpret", interpret)


@contextmanager
def set_knob(knobs: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of Triton's within the context."""
    before = getattr(knobs, name)
    setattr(knobs, name, value)
    try:
        yield
    finally:
        setattr(knobs, name, before)


@contextmanager
def interpreted_library() -> Iterator[None]:
    """Let Triton's own library, such as `tl.sum`, run in the interpreter within the context.

    Triton decides this when it is first imported, for the whole process. Numpy must not warn: NaN
    and infinity are values like others, and the interpreter of Triton 3.6 uses a deprecated
    conversion, which numpy 2.4 no longer has. By default the interpreter also computes each integer
    operation in 64 bits, to find overflows, but it drops the result unless it debugs: a third of
    its time. And for each value it makes the table of numpy's dtypes again: a tenth.
    """
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=False)
    compiled = dict(_library())
    for name, function in compiled.items():
        setattr(language, name, _interpreted(function))
    try:
        with (
            warnings.catch_warnings(),
            set_knob(builder, "options", options),
            set_knob(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype)),
        ):
            for kind in (RuntimeWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        for name, function in compiled.items():
            setattr(language, name, function)


def _numpy_dtypes(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function from types of Triton to numpy's dtypes that looks each of them up once."""
    dtypes: dict[str, Any] = {}

    def known_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = dtype_of(scalar)
        return dtypes[scalar.name]

    return known_dtype


@cache
def _library() -> dict[str, Any]:
    """Return the functions of Triton's library that are to be compiled, by name."""
    language, kind = importlib.import_module("triton.language"), triton().JITFunction
    return {
        name: function for name, function in vars(language).items() if isinstance(function, kind)
    }


@cache
def _interpreted(function: Any) -> Any:
    with _mode(interpret=True):
        return triton().jit(function.fn).rewrite()


def _call_directly(module: ModuleType) -> None:
    """Let functions of an interpreted module call each other without preparing each call again."""
    for name, value in list(vars(module).items()):
        if hasattr(value, "rewrite"):
            setattr(module, name, value.rewrite())


def _import_as(name: str) -> None:
    """Import the package of the tile bodies under a name."""
    file = Path(__file__).parent / "tiles" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
