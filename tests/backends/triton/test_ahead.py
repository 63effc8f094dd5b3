"""Tests of kernels compiled for a GPU that is not here, with a budget of resources per model.

The budget holds for Triton 3.6, 3.7 and 3.9. When a figure in it is exceeded, find out why before
it is raised: a kernel that spills, or that needs more shared memory than an SM has, is slow or does
not start. Others than three take minutes to compile.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tests.backends.reference.step_models import (
    GELU,
    GELU_TANH,
    HYBRID,
    HYBRID_EXPERTS,
    HYBRID_ODD,
    INT4,
    RELU,
    RELU2,
)
from tests.backends.reference.stepping import Case
from tests.conftest import MadeOnce
from tpcompile.backends.triton.ahead import Compiled, compile_ahead
from tpcompile.errors import UsageError
from tpcompile.presets import preset
from tpcompile.vm.program import Program
from tpcompile.vm.program.encoding import first_weights
from tpcompile.vm.program.instruction import WeightInstruction

BUDGET = json.loads((Path(__file__).parent / "budget.json").read_text())
_REGISTERS_OF_AN_SM = 65_536
_THREADS = 256
SPLIT = Case("biased", tp=2, lengths=(5,), column_splits=2)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def kernel_of(made_once: MadeOnce) -> Callable[..., Compiled]:
    """Return a function that compiles a kernel by its name, once for all tests and processes."""

    def compiled(name: str, arch: str = "sm_90") -> Compiled:
        def write(file: Path) -> None:
            file.write_bytes(pickle.dumps(compile_ahead(program_of(name), arch)))

        kernel: Compiled = pickle.loads(made_once(f"{name} {arch}.kernel", write).read_bytes())
        return kernel

    return compiled


def program_of(name: str) -> Program:
    """Return the program of a name in `_TILES`, or of a preset as it is named in the budget.

    A preset has few layers: the kernel is the same for every number of layers of each kind.
    """
    if name in _TILES:
        return _TILES[name].program
    name, _, batch = name.partition(", batch ")
    model, _, weights = name.partition(" ")
    shape = preset(model)
    layers = shape.get("full_attention_interval", 2)
    config = AutoConfig.for_model(**{**shape, "num_hidden_layers": layers})
    if weights == "fp8":
        config.quantization_config = FP8
        weights = ""
    step = tpcompile.schedule(
        config,
        target="h200",
        batch=int(batch or 1),
        context=2048,
        dtype="bf16",
        weights=weights or None,
    )
    return step.program


_QUICK = ("qwen3-0.6b", "qwen3-0.6b int8", "qwen3.5-0.8b")
"""Kernels that run by default: of plain weights, few bits, and linear attention."""
_MORE = [
    pytest.param(f"qwen3-0.6b {weights}", marks=pytest.mark.slow) for weights in ("fp8", "int4:64")
]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel in _QUICK else [pytest.mark.slow])
        for kernel in BUDGET
    ],
)
def test_the_kernel_is_within_its_budget(kernel: str, kernel_of: Callable[..., Compiled]) -> None:
    compiled = kernel_of(kernel)
    over = {name: compiled.to_json()[name] for name, most in BUDGET[kernel].items()}
    over = {name: value for name, value in over.items() if value > BUDGET[kernel][name]}
    assert not over
    assert compiled.registers * _THREADS <= _REGISTERS_OF_AN_SM


@pytest.mark.parametrize(
    ("kernel", "wide", "narrow"),
    [
        ("qwen3-0.6b", 90, 0),
        ("qwen3-0.6b int8", 100, 60),
        pytest.param("qwen3-0.6b fp8", 100, 60, marks=pytest.mark.slow),
        pytest.param("qwen3-0.6b int4:64", 90, 80, marks=pytest.mark.slow),
    ],
)
def test_weights_are_loaded_ahead(
    kernel: str, wide: int, narrow: int, kernel_of: Callable[..., Compiled]
) -> None:
    """Each tile of weights is on its way to shared memory in loads of 128 bits.

    Scales are too, in words.
    """
    assembly = kernel_of(kernel).assembly
    sizes = re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", assembly)
    assert sizes.count("0x10") >= wide and sizes.count("0x4") >= narrow


def test_weights_of_experts_are_loaded_ahead() -> None:
    """There is room for two tiles of 16 rows, though addresses depend on the numbers of an item."""
    for kind, sides in (("norm_experts", 2), ("expert_terms", 1)):
        program = program_of("qwen3-30b-a3b")
        instructions = tuple(
            instruction for instruction in program.instructions if instruction.name == kind
        )
        compiled = compile_ahead(replace(program, instructions=instructions), "sm_90")
        assert compiled.shared_bytes >= 2 * sides * 16 * 512 * 2, kind


@pytest.mark.parametrize("kernel", ["qwen3-0.6b int8", *_MORE])
def test_weights_of_few_bits_are_widened_where_they_are_multiplied(
    kernel: str, kernel_of: Callable[..., Compiled]
) -> None:
    """They are neither converted, which is slow, nor stored in shared memory again.

    A projection alone would store 32 numbers per tile and thread.
    """
    assembly = kernel_of(kernel).assembly
    assert "cvt.rn.bf16.s" not in assembly
    assert assembly.count("st.shared.b16") < 32


_TILES = {
    "split columns": SPLIT,
    "experts": Case(HYBRID_EXPERTS, lengths=(5, 2)),
    "windows": Case(
        "windowed", lengths=(9, 3), lowering="rows", interleaved=True, policy="dynamic"
    ),
    "ranks": Case("even", tp=2, lengths=(5,)),
    "offsets": Case(INT4, tp=2, lengths=(5, 2)),
    "linear attention": Case(HYBRID, tp=2, lengths=(5,)),
    "odd heads": Case(HYBRID_ODD, lengths=(5, 2), lowering="rows"),
}
"""Options that no preset has: biases, windows, row blocks, split columns, several sequences."""
_FIRST = (("split columns", "sm_90"), ("experts", "sm_90"))
"""Those that are compiled by default."""


@pytest.mark.parametrize(
    ("tiles", "arch"),
    [
        pytest.param(tiles, arch, marks=[] if (tiles, arch) in _FIRST else [pytest.mark.slow])
        for arch in ("sm_80", "sm_90")
        for tiles in _TILES
    ],
)
def test_every_tile_compiles(tiles: str, arch: str, kernel_of: Callable[..., Compiled]) -> None:
    compiled = kernel_of(tiles, arch)
    assert compiled.code_bytes > 0 and compiled.registers > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [GELU, GELU_TANH, RELU, RELU2])
def test_every_activation_compiles(model: str) -> None:
    compiled = compile_ahead(Case(model, lengths=(5,)).program, "sm_90")
    assert compiled.code_bytes > 0 and compiled.spills == 0


@pytest.mark.parametrize("arch", ["sm90", "sm_70", "gfx942", ""])
def test_other_architectures_are_refused(arch: str) -> None:
    with pytest.raises(UsageError, match=r"sm_80 or newer, such as sm_90"):
        tpcompile.schedule("preset:tiny-qwen3", target="h200").compile_ahead(arch)


def test_first_weights_are_asked_for_before_waits(kernel_of: Callable[..., Compiled]) -> None:
    """The rows and columns of each instruction's weights, in bytes of their buffer."""
    assert "prefetch.global.L2" in kernel_of("split columns").assembly
    pairs = zip(SPLIT.program.instructions, first_weights(SPLIT.program).tolist(), strict=True)
    for instruction, (number, first, count) in pairs:
        if not isinstance(instruction, WeightInstruction):
            assert number == -1
            continue
        buffer = SPLIT.program.buffers[number]
        region = next(region for region in instruction.reads if region.buffer == number)
        bytes_of = torch.arange(4 * buffer.shape[0] * buffer.shape[1]).view(*buffer.shape, 4)
        rows, columns = (slice(*interval) for interval in region.box)
        assert bytes_of[rows, columns].min() == first
        assert bytes_of[rows, columns].max() <= first + count - 1 < bytes_of.numel()
