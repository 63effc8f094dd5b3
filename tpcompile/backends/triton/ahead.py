"""Ahead-of-time compilation of kernels, without the GPU, and the resources of the kernels."""

from __future__ import annotations

import importlib
import re
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from tpcompile.backends.triton.emit import emit
from tpcompile.backends.triton.load import load_kernels, set_knob, tiles_package, triton
from tpcompile.backends.triton.options import COMPILED, LEAST_CAPABILITY, SPINS
from tpcompile.errors import CompileError, UsageError
from tpcompile.inspect.tables import table_text
from tpcompile.vm.program import Program

_LEAST_ARCH = 10 * LEAST_CAPABILITY[0] + LEAST_CAPABILITY[1]
_POINTERS = {
    **dict.fromkeys(("buffers", "weights", "counters", "before", "times"), "*i64"),
    "scratch": "*fp32",
}
_ALIGNED = 16


@dataclass(frozen=True)
class Compiled:
    """A kernel for a GPU, and the resources of each worker."""

    arch: str
    registers: int
    """Registers per thread."""
    spills: int
    """Bytes of spilled registers per thread."""
    shared_bytes: int
    """Bytes of shared memory."""
    code_bytes: int
    seconds: float
    """The time of compilation."""
    assembly: str
    """The PTX of the kernel."""

    def to_json(self) -> dict[str, Any]:
        names = ("arch", "registers", "spills", "shared_bytes", "code_bytes")
        return {name: getattr(self, name) for name in names} | {"seconds": round(self.seconds, 2)}

    def table(self) -> str:
        """Format the resources as a table."""
        from rich.table import Table

        table = Table(title=f"kernel for {self.arch}", title_justify="left", show_header=False)
        table.add_column(min_width=20)
        table.add_column(min_width=20, justify="right")
        for name, value in (
            ("registers per thread", f"{self.registers:,}"),
            ("spills per thread", f"{self.spills:,} B"),
            ("shared memory", f"{self.shared_bytes:,} B"),
            ("code", f"{self.code_bytes:,} B"),
            ("compiled in", f"{self.seconds:.1f} s"),
        ):
            table.add_row(name, value)
        return table_text(table)


def compile_ahead(program: Program, arch: str) -> Compiled:
    """Compile the kernel of a program for an architecture such as `sm_90`."""
    number = check_ahead(arch)
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    kernel = load_kernels(emit(program, tiles_package(interpret=False)).source, False).megakernel
    constants = {"SHARING": program.sharing, "SPINS": SPINS, "TIMED": False}
    signature = {name: _type_of(name, constants) for name in kernel.arg_names}
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", _ALIGNED]]
            for place, kind in enumerate(signature.values())
            if kind.startswith("*")
        },
    )
    target = backends.GPUTarget("cuda", number, 32)
    # Compile also what Triton's cache holds, so that the seconds are those of compilation.
    with set_knob(triton().knobs.compilation, "always_compile", True):
        started = time.perf_counter()
        compiled = compiler.compile(source, target=target, options=COMPILED)
        seconds = time.perf_counter() - started
    binary: bytes = compiled.asm["cubin"]
    usage = _resources(binary)
    return Compiled(
        arch,
        usage["REG"],
        usage["STACK"],
        int(compiled.metadata.shared),
        _code_size(binary),
        seconds,
        compiled.asm["ptx"],
    )


def check_ahead(arch: str) -> int:
    """Return the number of an architecture. Raise if it is not supported or Triton is missing."""
    triton()
    match = re.fullmatch(r"sm_(\d+)", arch)
    if match is None or int(match[1]) < _LEAST_ARCH:
        raise UsageError(
            "The architecture must be that of an NVIDIA GPU that kernels can run on",
            got=arch,
            expected=f"sm_{_LEAST_ARCH} or newer, such as sm_90",
        )
    return int(match[1])


def _type_of(name: str, constants: dict[str, int]) -> str:
    """Return the type of an argument of the kernel. Most are arrays of int32."""
    if name in constants:
        return "constexpr"
    return _POINTERS.get(name, "*i32")


def _resources(binary: bytes) -> dict[str, int]:
    """Return the resources of the kernel, as the tool that comes with Triton prints them."""
    tool = triton().knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"Function megakernel:\s*(.*)", done.stdout)
    if done.returncode or match is None:
        raise CompileError(
            "The resources of the kernel could not be read", got=(done.stderr or done.stdout)[-500:]
        )
    return {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", match[1])}


def _code_size(binary: bytes) -> int:
    """Return the bytes of all sections with instructions of an ELF file."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    total = 0
    for place in range(count):
        _, kind, flags, _, _, length = struct.unpack_from("<IIQQQQ", binary, table + place * size)
        if kind == 1 and flags & 0x4:  # SHT_PROGBITS, SHF_EXECINSTR
            total += length
    return total
