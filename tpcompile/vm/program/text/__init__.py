"""The text form of a program, which round-trips. The grammar is in docs/program.md."""

from tpcompile.vm.program.text.parser import parse_program
from tpcompile.vm.program.text.printer import format_layer, format_program

__all__ = ["format_layer", "format_program", "parse_program"]
