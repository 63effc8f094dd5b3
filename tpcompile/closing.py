"""Objects that a `with` statement closes."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Mixin of classes with a `close` method, which the end of a `with` statement calls."""

    def close(self) -> None:
        """Release what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
