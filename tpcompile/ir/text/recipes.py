"""Recipes in the text of a graph: `q.weight(96, 64)[0:48] ++ k.weight(32, 64)[0:16]`."""

from __future__ import annotations

import math

from tpcompile.ir.format import Format
from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, Tensor, shape_of, with_item
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.words import quoted

MOST_ELEMENTS = 1 << 40
"""The maximum number of elements of a tensor."""
_DEEPEST = 32
"""The maximum depth of parentheses."""


def written_recipe(recipe: Recipe, shape: tuple[object, ...]) -> str:
    """Format a recipe with the shapes of its tensors, except for tensors of this shape."""
    match recipe:
        case Tensor(name=name, shape=own):
            extents = ", ".join(map(str, own))
            return quoted(name) if own == shape else f"{quoted(name)}({extents})"
        case Slice(source, dim, start, stop):
            return f"{_inner(source, shape)}[{':, ' * dim}{start}:{stop}]"
        case Concat(sources, dim):
            sign = " ++ " if dim == 0 else f" ++(dim {dim}) "
            return sign.join(_inner(source, shape) for source in sources)
        case Permute(source, dim, view, order):
            axes = f"({_listed(view)}) to ({_listed(order)})"
            return f"permute({written_recipe(source, shape)}, dim {dim} as {axes})"
        case Pad(source, dim, rows):
            return f"pad({written_recipe(source, shape)}, dim {dim} by {rows})"


def _inner(recipe: Recipe, shape: tuple[object, ...]) -> str:
    written = written_recipe(recipe, shape)
    return f"({written})" if isinstance(recipe, Concat) else written


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


class RecipeParser:
    """A parser of recipes. Tensors have the format of their parameter, and by default its shape."""

    def __init__(self, line: Scanner, shape: tuple[int, ...], stored: Format | None = None) -> None:
        self._line, self._shape, self._stored = line, shape, stored
        self._depth = 0

    def recipe(self) -> Recipe:
        line = self._line
        self._depth += 1
        if self._depth > _DEEPEST:
            raise line.refusal("The recipe is nested too deeply")
        sources = [self._sliced()]
        dim = 0
        while line.accept(" ++"):
            next_dim = self._dim_of_sum()
            if len(sources) > 1 and next_dim != dim:
                raise line.refusal("The dimensions of a concatenation differ", f"dim {dim}")
            dim = next_dim
            sources.append(self._sliced())
            self._check_alike(sources, dim)
        self._depth -= 1
        return sources[0] if len(sources) == 1 else Concat(tuple(sources), dim)

    def _dim_of_sum(self) -> int:
        dim = 0
        if self._line.accept("(dim "):
            dim = self._line.integer("a dimension")
            self._line.expect(")")
        self._line.expect(" ")
        return dim

    def _check_alike(self, sources: list[Recipe], dim: int) -> None:
        first, last = shape_of(sources[0]), shape_of(sources[-1])
        if dim >= len(first) or with_item(first, dim, 0) != with_item(last, dim, 0):
            raise self._line.refusal(
                f"The shapes {list(first)} and {list(last)} cannot be joined along dim {dim}"
            )

    def _sliced(self) -> Recipe:
        line, recipe = self._line, self._atom()
        while line.accept("["):
            dim = 0
            while line.accept(":, "):
                dim += 1
            start = line.integer("the first index")
            line.expect(":")
            stop = line.integer("the last index")
            extent = self._extent(recipe, dim)
            if not start < stop <= extent:
                raise line.refusal(f"The slice {start}:{stop} is not inside of {extent} indices")
            line.expect("]")
            recipe = Slice(recipe, dim, start, stop)
        return recipe

    def _atom(self) -> Recipe:
        line = self._line
        if line.accept("("):
            recipe = self.recipe()
            line.expect(")")
            return recipe
        if line.accept("permute("):
            return self._permute()
        if line.accept("pad("):
            source = self.recipe()
            dim = self._of_dim(source)
            line.expect(" by ")
            rows = line.integer("a number of rows")
            line.expect(")")
            return Pad(source, dim, rows)
        name = line.name("the name of a tensor")
        shape = line.integers(")", "an extent") if line.accept("(") else self._shape
        if not fits(shape):
            raise line.refusal(f"A tensor cannot have the shape {list(shape)}")
        return Tensor(name, shape, self._stored)

    def _permute(self) -> Recipe:
        line, source = self._line, self.recipe()
        dim = self._of_dim(source)
        line.expect(" as (")
        view = line.integers(")", "an extent")
        line.expect(" to (")
        order = line.integers(")", "an axis")
        if math.prod(view) != shape_of(source)[dim] or sorted(order) != list(range(len(view))):
            raise line.refusal(f"{view} to {order} is not a permutation of dim {dim}")
        line.expect(")")
        return Permute(source, dim, view, order)

    def _of_dim(self, source: Recipe) -> int:
        self._line.expect(", dim ")
        dim = self._line.integer("a dimension")
        self._extent(source, dim)
        return dim

    def _extent(self, source: Recipe, dim: int) -> int:
        shape = shape_of(source)
        if dim >= len(shape):
            raise self._line.refusal(f"There is no dimension {dim}", f"one of {len(shape)}")
        return shape[dim]


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape has from 1 to `MOST_ELEMENTS` elements."""
    return 1 <= math.prod(shape) <= MOST_ELEMENTS
