"""Regions fit their buffers, or the refusal explains why not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import MANY
from tpcompile.vm.program import Box, Buffer
from tpcompile.vm.program.region import all_fit, box_text, refusal

interval = st.tuples(st.integers(-1, 4), st.integers(-1, 4))


@MANY
@given(
    st.lists(st.lists(interval, max_size=2).map(tuple), max_size=3),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
)
def test_boxes_that_do_not_fit_are_refused_with_a_reason(
    boxes: list[Box], shape: tuple[int, ...]
) -> None:
    assert all_fit(boxes, shape) == all(refusal(box, shape) == "" for box in boxes)


def test_the_reason_names_the_dimension() -> None:
    assert refusal(((0, 2), (0, 2)), (2, 1)) == "0:2 in dimension 1, whose extent is 1"
    assert refusal(((0, 2),), (2, 1)) == "a box of 1 intervals in a buffer of 2 dimensions"
    assert refusal(Buffer("x", (2, 3)).box, (2, 3)) == ""
    assert box_text(((0, 2), (1, 3))) == "[0:2, 1:3]"
