"""Regions fit their buffers, or the refusal explains why not."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import MANY, boxes
from tpcompile.vm.program import Box, Buffer
from tpcompile.vm.program.region import all_fit, box_text, refusal, remainder

interval = st.tuples(st.integers(-1, 4), st.integers(-1, 4))


@MANY
@given(
    st.lists(st.lists(interval, max_size=2).map(tuple), max_size=3),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
)
def test_boxes_that_do_not_fit_are_refused_with_a_reason(
    some: list[Box], shape: tuple[int, ...]
) -> None:
    assert all_fit(some, shape) == all(refusal(box, shape) == "" for box in some)


def test_the_reason_names_the_dimension() -> None:
    assert refusal(((0, 2), (0, 2)), (2, 1)) == "0:2 in dimension 1, whose extent is 1"
    assert refusal(((0, 2),), (2, 1)) == "a box of 1 intervals in a buffer of 2 dimensions"
    assert refusal(Buffer("x", (2, 3)).box, (2, 3)) == ""
    assert box_text(((0, 2), (1, 3))) == "[0:2, 1:3]"


@MANY
@given(
    st.sampled_from([(), (5,), (3, 4), (2, 3, 2)]).flatmap(
        lambda shape: st.lists(boxes(shape), min_size=1, max_size=4)
    )
)
def test_what_remains_of_a_box_is_disjoint_and_complete(drawn: list[Box]) -> None:
    box, *removed = drawn
    elements = [element for piece in remainder(box, removed) for element in _elements(piece)]
    assert len(elements) == len(set(elements))
    assert set(elements) == set(_elements(box)).difference(*map(_elements, removed))


def _elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(*interval) for interval in box)))
