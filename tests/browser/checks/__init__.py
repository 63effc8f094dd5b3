"""What a reader must find on the page. Each check compares its text with the compiler's objects."""

from collections.abc import Callable

from tests.browser.checks import comparison, drawing, pipeline, ranks, values

CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        pipeline.passes,
        pipeline.diff,
        pipeline.fates,
        pipeline.beside,
        pipeline.overview,
        values.readers,
        values.line,
        values.placement,
        values.recipe,
        values.needs,
        values.rule,
        values.history,
        values.expression,
        values.proof,
        values.cost,
        values.source,
        drawing.drawing,
        drawing.lighting,
        ranks.shares,
        ranks.heads,
        ranks.module,
        ranks.collectives,
        comparison.comparison,
    )
}
"""Every check, by name."""
