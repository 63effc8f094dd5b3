"""An attribute that is computed on first use."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpcompile.lazy import cached_property


@dataclass(frozen=True)
class _Counted:
    runs: list[int] = field(default_factory=list)

    @cached_property
    def found(self) -> int:
        """The number of times that it was computed."""
        self.runs.append(1)
        return len(self.runs)


def test_it_is_computed_once_per_object() -> None:
    counted, other = _Counted(), _Counted()
    assert "found" not in vars(counted)
    assert (counted.found, counted.found, other.found) == (1, 1, 1)
    assert counted.runs == other.runs == [1]


def test_on_the_class_it_is_the_property() -> None:
    assert isinstance(_Counted.found, cached_property)
    assert _Counted.found.__doc__ == "The number of times that it was computed."
