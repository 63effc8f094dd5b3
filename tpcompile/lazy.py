"""Attributes that are computed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801
    """`functools.cached_property` as it is since Python 3.12: without a lock.

    In Python 3.11 the lock takes longer than most of the attributes of instructions.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        self.func = func
        self.__doc__ = func.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object, owner: type | None = None) -> cached_property[T] | T:
        if instance is None:
            return self
        value = vars(instance)[self._name] = self.func(instance)
        return value
