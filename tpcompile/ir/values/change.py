"""Replacements of index variables in expressions."""

from __future__ import annotations

from tpcompile.ir.values.index import BOUND, Index, Name, deeper, names_of
from tpcompile.ir.values.node import Term


class Change:
    """A replacement of variables by indices, with the terms that it has been applied to.

    Other bound variables are renamed by `shift`, where a binder is added or removed.
    """

    __slots__ = ("_deep", "_done", "_keys", "_local", "_moved", "by", "shift")

    def __init__(self, by: dict[Name, Index], shift: int = 0) -> None:
        self.by, self.shift = by, shift
        names = (*by, *(name for index in by.values() for name in names_of(index)))
        self._local = bool(shift) or any(kind == BOUND for kind, _ in names)
        self._keys = None if any(kind == BOUND for kind, _ in by) else frozenset(by)
        self._done: dict[int, dict[Term, Term]] = {}
        self._moved: dict[int, dict[tuple[Index, ...], tuple[Index, ...]]] = {}
        self._deep: dict[int, dict[Name, Index]] = {0: by}

    def under(self, depth: int) -> dict[Name, Index]:
        """Return the replacement within this number of further binders."""
        if not self._local:
            return self.by
        if depth not in self._deep:
            self._deep[depth] = {
                (kind, name + depth if kind == BOUND else name): deeper(index, depth)
                for (kind, name), index in self.by.items()
            }
        return self._deep[depth]

    def done(self, depth: int) -> dict[Term, Term]:
        """Return the terms that have been replaced at a depth, if that matters."""
        return self._done.setdefault(depth if self._local else 0, {})

    def moved(self, depth: int) -> dict[tuple[Index, ...], tuple[Index, ...]]:
        """Return the indices that have been replaced at a depth, if that matters."""
        return self._moved.setdefault(depth if self._local else 0, {})

    def touches(self, term: Term, depth: int) -> bool:
        """Return whether the replacement can change a term."""
        free = term.free
        if not free:
            return False
        keys = self._keys if self._keys is not None else self.under(depth)
        if not free.isdisjoint(keys):
            return True
        return bool(self.shift) and any(k == BOUND and n >= depth for k, n in free)
