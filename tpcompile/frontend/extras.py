"""Import of transformers without its extras: packages that it imports if they are installed."""

from __future__ import annotations

import sys
from typing import Any

_EXTRAS = ("accelerate", "scipy")
"""The extras that it imports with every model. Capture needs none of them."""


def import_without_extras() -> None:
    """Import transformers as if its extras were not installed, which saves half a second.

    It looks for them when it is imported, and remembers the result. So this is for processes of our
    own; they can still import the extras themselves.
    """
    if "transformers" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in _EXTRAS if name not in modules]
    modules.update(dict.fromkeys(hidden))  # None stands for a module that does not exist
    try:
        import transformers  # noqa: F401
    finally:
        for name in hidden:
            del modules[name]
