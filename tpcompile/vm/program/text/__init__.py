"""The text form of a program, which round-trips.

    program  := "program" name "ranks="n "sharing="n "repeats="bool "counters="n section*
    buffers  := "b"n name "rank="n "role="role "dtype="dtype "shape="shape ["storage="shape]
    operands := "a"n name (field"="value)*              shared by instructions
    instructions := "i"n name "a"n (field"="value)* ["wait" ("c"n">="n)*] ["signal" ("c"n)*]
    queues   := "w"n (n | start":"stop[":"step])*       one line per queue

Each entry is one line. All numbers count from 0 in order. `#` starts a comment.
"""

from tpcompile.vm.program.text.parser import parse_program
from tpcompile.vm.program.text.printer import format_layer, format_program

__all__ = ["format_layer", "format_program", "parse_program"]
