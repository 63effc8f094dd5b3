"""`tpcompile passes`: list all passes and pipelines with their options and descriptions."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from tpcompile.cli.command import Command, Parser, Result, json_text
from tpcompile.cli.compiling import progress

_WIDTH = 80
_MIDDLE = 23
"""The column of descriptions."""
_EXAMPLES = """\
  tpcompile passes
  tpcompile passes --json
  tpcompile dump preset:tiny-qwen3 --tp 2 -p "canonicalize,raise-norm"
  tpcompile dump preset:tiny-qwen3 --tp 2 -p "decode{spans=4}"
"""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _run(args: argparse.Namespace) -> Result:
    with progress():
        passes, pipelines = _passes(), _pipelines()
    if args.json:
        return Result(json_text({"passes": passes, "pipelines": pipelines}))
    standard = [_paragraph(entry) for entry in passes if entry["standard"]]
    optional = [_paragraph(entry) for entry in passes if not entry["standard"]]
    whole = [_paragraph(entry) for entry in pipelines]
    lines = ["The standard pipeline, in order:", *standard, "", "Optional:", *optional, ""]
    return Result("\n".join([*lines, "Whole pipelines:", *whole, "", *_HOW_TO]))


_HOW_TO = (
    "The text of a pipeline lists passes or whole pipelines, with options in braces:",
    '  -p "canonicalize,raise-norm,…,plan-sharding{ffn_grain=8},shard-linears,…"',
    '  -p "decode{spans=4,block=16}"',
    "",
)


def _passes() -> list[dict[str, Any]]:
    from tpcompile.passes import PASSES, default_pipeline

    standard = {current.name for current in default_pipeline()}
    return [
        {
            "name": name,
            "standard": name in standard,
            "doc": _first_paragraph(inspect.getdoc(kind) or ""),
            "options": _options(kind),
        }
        for name, kind in PASSES.items()
    ]


def _pipelines() -> list[dict[str, Any]]:
    from tpcompile.passes import PIPELINES

    return [
        {
            "name": name,
            "doc": _first_paragraph(inspect.getdoc(kind) or ""),
            "options": _options(kind),
            "passes": [current.name for current in kind().passes()],
        }
        for name, kind in PIPELINES.items()
    ]


def _first_paragraph(doc: str) -> str:
    return " ".join(doc.partition("\n\n")[0].split())


def _options(kind: type[Any]) -> list[dict[str, Any]]:
    docs = _field_docs(kind)
    return [
        {
            "name": option.name,
            "type": type(option.default).__name__,
            "default": option.default,
            "doc": docs.get(option.name, ""),
        }
        for option in dataclasses.fields(kind)
    ]


def _field_docs(kind: type[Any]) -> dict[str, str]:
    """Read the string below each field from the source: Python does not store it elsewhere."""
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(declared, ast.ClassDef)
    docs = {}
    for line, below in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(doc))):
                    docs[line.target.id] = _first_paragraph(doc)
    return docs


def _paragraph(entry: dict[str, Any]) -> str:
    lines = _columns(entry["name"], entry["doc"], 2)
    for option in entry["options"]:
        lines += _columns(f"{option['name']}={option['default']}", option["doc"], 4)
    return "\n".join(lines)


def _columns(left: str, right: str, indent: int) -> list[str]:
    head = f"{' ' * indent}{left}".ljust(_MIDDLE - 1) + " "
    return textwrap.wrap(right, _WIDTH, initial_indent=head, subsequent_indent=" " * _MIDDLE)


COMMAND = Command(
    "list all passes and pipelines with their options", _EXAMPLES, _add_arguments, _run
)
