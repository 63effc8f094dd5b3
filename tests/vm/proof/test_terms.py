"""Terms: equal values in one form, and the difference of two."""

from __future__ import annotations

import pytest

from tpcompile.vm.proof.terms import TOKENS, Difference, Term, Terms, is_partition, unlike


def _value(terms: Terms, name: str, *shape: int) -> Term:
    return terms.call("input", name, shape=(TOKENS, *shape))


def test_equal_calls_are_one_term() -> None:
    terms = Terms()
    x = _value(terms, "x", 8)
    assert terms.call("f", x, 1e-6) is terms.call("f", x, 1.000000001e-6), "rounded to fp32"
    assert terms.call("f", x, 2e-6) is not terms.call("f", x, 1e-6)
    assert terms.call("f", x).shape == x.shape and len(terms) == 4


def test_columns_of_columns_are_columns() -> None:
    terms = Terms()
    x = _value(terms, "x", 8)
    assert terms.columns(x, 0, 8) is x
    assert terms.columns(terms.columns(x, 2, 8), 1, 3) is terms.columns(x, 3, 5)
    assert terms.columns(x, 2, 5).shape == (TOKENS, 3)


def test_views_of_heads_cancel() -> None:
    terms = Terms()
    x = _value(terms, "x", 8)
    heads = terms.heads(x, 4)
    assert heads.shape == (TOKENS, 2, 4) and terms.flat(heads) is x
    y = _value(terms, "y", 2, 4)
    assert terms.heads(terms.flat(y), 4) is y
    assert terms.heads(terms.flat(y), 2) is not y


def test_sums_are_the_same_in_any_order_and_count_each_addend() -> None:
    terms = Terms()
    x, y, z = (_value(terms, name, 8) for name in "xyz")
    assert terms.total(x, terms.total(y, z)) is terms.total(z, x, y)
    assert terms.total(x, x) is not terms.total(x)
    assert terms.total(x) is x


def test_columns_of_a_linear_add_up_only_if_each_is_there_once() -> None:
    terms = Terms()
    x, residual = _value(terms, "x", 8), _value(terms, "residual", 4)
    weight = terms.call("weight", "w", shape=(4, 8))

    def columns(*ranges: tuple[int, int]) -> Term:
        return terms.total(
            residual, *(terms.linear_of_columns(x, weight, *interval) for interval in ranges)
        )

    whole = terms.total(residual, terms.linear(x, weight, None))
    assert columns((3, 8), (0, 3)) is whole
    assert columns((0, 3)) is not whole
    assert columns((0, 3), (3, 8), (0, 3)) is not whole
    assert columns((0, 4), (3, 8)) is not whole


def test_the_greatest_of_blocks_is_that_of_all_rows_in_order() -> None:
    terms = Terms()
    logits, remaining = _value(terms, "a", 8), _value(terms, "b", 6)

    def greatest(*blocks: tuple[Term, int, int, int]) -> Term:
        best = [terms.best_of_rows(x, start, stop) for x, start, stop, _ in blocks]
        return terms.greatest(*best, *(terms.its_row(*block) for block in blocks))

    whole = terms.argmax(iter([(logits, 0), (remaining, 8)]))
    assert greatest((logits, 0, 5, 0), (logits, 5, 8, 0), (remaining, 0, 6, 8)) is whole
    assert greatest((logits, 5, 8, 0), (logits, 0, 5, 0), (remaining, 0, 6, 8)) is not whole
    assert greatest((logits, 0, 5, 0), (remaining, 0, 6, 8)) is not whole
    assert greatest((logits, 0, 8, 0), (remaining, 0, 6, 7)) is not whole
    assert greatest((logits, 0, 8, 0), (logits, 0, 8, 0)) is terms.argmax(iter([(logits, 0)]))


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([(0, 2), (2, 5)], True), ([(2, 5), (0, 2)], True), ([(0, 3), (2, 5)], False), ([], False)],
)
def test_partitions(intervals: list[tuple[int, int]], expected: bool) -> None:
    assert is_partition(intervals, 5) is expected


def test_a_difference_is_the_innermost_and_names_values() -> None:
    terms = Terms()
    x, y = _value(terms, "x", 8), _value(terms, "y", 8)
    wanted, got = terms.call("g", terms.call("f", x, 1)), terms.call("g", terms.call("f", y, 1))
    difference = Difference(wanted, got, {x: "%x"})
    assert str(difference) == "has %x, in f of g, where the program has input(y)"
    whole = Difference(terms.call("h", wanted), terms.call("h", got), {wanted: "%0", got: "%1"})
    assert str(whole) == "has %0, in h, where the program has %1"
    assert unlike(wanted.args[0], got.args[0]) == 1
    residual = Difference(terms.total(x, wanted), terms.total(y, wanted), {})
    assert (residual.wanted, residual.got) == (x, y)
