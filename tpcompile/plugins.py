"""Packages that extend tpcompile, found by the entry-point group `tpcompile.plugins`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from tpcompile.errors import CompileError, UsageError

GROUP = "tpcompile.plugins"


@cache
def load_plugins() -> tuple[str, ...]:
    """Import the installed plugins and return their names.

    An entry point names a module. Importing it registers the ops, passes, instructions, policies,
    targets and backends that it adds.
    """
    entries = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in entries:
        try:
            entry.load()
        except CompileError as error:
            raise error.at(error.where or f"the plugin {entry.name} ({entry.value})") from error
        except Exception as error:
            raise UsageError(
                f"The plugin {entry.name} cannot be imported",
                where=f"the entry point {entry.value}",
                got=f"{type(error).__name__}: {error}",
                hint="Fix or uninstall the package",
            ) from error
    return tuple(entry.name for entry in entries)
