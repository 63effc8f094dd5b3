"""The text form of a program, which round-trips.

    program  := "program" name "ranks="n "sharing="n "repeats="bool "counters="n section*
    buffers  := "b"n name "rank="n "kind="kind "dtype="dtype "shape="shape ["storage="shape]
    operands := "a"n name (field"="value)*              what instructions share
    instructions := "i"n name "a"n (field"="value)* ["wait" ("c"n">="n)*] ["signal" ("c"n)*]
    queues   := "w"n (n | start":"stop[":"step])*       one line a queue

One line for each; all numbers count from 0 in order. What stands behind `#` is a comment.
"""

from tpcompile.vm.program.text.parser import parse_program
from tpcompile.vm.program.text.printer import format_layer, format_program

__all__ = ["format_layer", "format_program", "parse_program"]
