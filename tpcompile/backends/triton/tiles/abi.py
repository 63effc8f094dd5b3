"""The constants of the binary interface, as Triton constants: see `tpcompile.vm.program.abi`."""

import triton.language as tl

from tpcompile.vm.program.abi import COLUMNS, constants

BUFFER_COLUMNS = tl.constexpr(sum(COLUMNS.values()))
NONE = tl.constexpr(-1)
globals().update({name: tl.constexpr(value) for name, value in constants().items()})
