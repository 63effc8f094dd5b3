"""Errors of libraries outside the versions that tpcompile was tested with.

A newer library may work, so it is not refused. If it lacks a name or an argument that tpcompile
uses, the error says which version is installed and which ones are supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tpcompile.errors import UnsupportedError


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise an error that names the versions if an untested library lacks what tpcompile uses."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        untested = _untested()
        if not untested or _package_of(error.__traceback__) not in {"tpcompile", *untested}:
            raise  # a mistake of tpcompile, or of the user's own code
        installed = " and ".join(f"{name} {version}" for name, (version, _) in untested.items())
        supported = [f"{name}{versions}" for name, (_, versions) in untested.items()]
        raise UnsupportedError(
            f"tpcompile does not work with {installed}",
            got=f"{type(error).__name__}: {error}",
            expected=" and ".join(supported),
            hint="Run `pip install " + " ".join(f"'{library}'" for library in supported) + "`",
        ) from error


def _untested() -> dict[str, tuple[str, str]]:
    """Return the installed version and the supported range of libraries outside their range."""
    # Imported here: only a failure needs them.
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    untested: dict[str, tuple[str, str]] = {}
    for library in map(Requirement, requires("tpcompile") or ()):
        if library.marker is not None and not library.marker.evaluate({"extra": "triton"}):
            continue
        try:
            installed = version(library.name)
        except PackageNotFoundError:  # an extra that is not installed
            continue
        if not library.specifier.contains(installed, prereleases=True):
            bounds = sorted(map(str, library.specifier), reverse=True)  # the lower one first
            untested[library.name] = installed, ",".join(bounds)
    return untested


def _package_of(traceback: TracebackType | None) -> str:
    """Return the top-level package of the code that raised."""
    module = ""
    while traceback is not None:
        module, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return module.partition(".")[0]
