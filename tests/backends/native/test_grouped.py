"""Weights of few bits on all vector paths: sums of blocks, cut groups, and equal bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.backends.programs import FLOATS8, KINDS, LONG, ROUNDS, memory_of
from tests.models import relative_error
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import has_kernel, paths
from tpcompile.backends.reference import Machine
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import HIGH, Format
from tpcompile.vm.groups.embed import Embed
from tpcompile.vm.groups.head import NormLmHead
from tpcompile.vm.groups.project import LinearTerms
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import unseen

pytestmark = pytest.mark.usefixtures("verified_once")

PATHS = paths()
FEW_BITS = ("int8:row", "int8:32", "int8:64", "int8:128", "int8:256")
FEWER_BITS = ("int4:32", "int4:64", "int4:128", "int4:row")
ROUNDING_KINDS = tuple(f"{kind}{ROUNDS}" for kind in ("Q5_1", "Q4_K", "Q5_K", "Q6_K"))
ROUNDING = (
    *(f"{word}{ROUNDS}" for word in ("int8:row", "int8:32", "int4:64", "int4:row")),
    *ROUNDING_KINDS,
)
EXACT, ROUNDED = 1e-5, 2**-16
"""The error of sums in fp32, and that of values in 16 bits, of the largest one in a block."""


def _terms(memory: StepMemory) -> list[int]:
    """Return the numbers of the instructions whose sums are not rounded to the model's dtype."""
    numbered = enumerate(memory.program.instructions)
    return [number for number, instruction in numbered if isinstance(instruction, LinearTerms)]


def _filled(memory: StepMemory, seed: int = 0) -> StepMemory:
    """Write random values, of which a few are large, to the inputs of these instructions."""
    generator = torch.Generator().manual_seed(seed)
    for number in _terms(memory):
        instruction: Any = memory.program.instructions[number]
        held = memory.tensors[instruction.at.x]
        values = torch.randn(held.shape, generator=generator)
        held.copy_(torch.where(torch.rand(held.shape, generator=generator) < 0.02, 50, 1) * values)
    return memory


def _sums(memory: StepMemory, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Run these instructions on a path and on the reference machine.

    Yield the label of each, its sums, and those that are expected.
    """
    native = Native(memory, path)
    for number in _terms(memory):
        instruction: Any = memory.program.instructions[number]
        native.execute(number, unseen)
        out = memory.tensors[instruction.at.out][instruction.terms.slice, instruction.rows.slice]
        actual = out.clone()
        instruction.run(memory.tensors)
        yield instruction.label, actual, out
    native.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("few_bits", [*FEW_BITS, *FEWER_BITS, *KINDS, *FLOATS8, *ROUNDING])
def test_terms_are_exact(few_bits: str, dtype: torch.dtype, path: str) -> None:
    """Three ranks and the leaves of their sums cut groups; rows fill no loads."""
    memory = _filled(memory_of("tiny-qwen3", dtype, 3, 7, odd=True, few_bits=few_bits))
    native, other = Native(memory, path), copy.copy(memory)
    other.tensors = [copy.deepcopy(held) for held in memory.tensors]
    for number in _terms(memory):
        linear: Any = memory.program.instructions[number]
        native.execute(number, unseen)
        linear.run(other.tensors)
        actual, expected = (
            held.tensors[linear.at.out][linear.terms.slice, linear.rows.slice]
            for held in (memory, other)
        )
        allowed = EXACT * expected.abs().max()
        if dtype != torch.float32 and not few_bits.endswith(ROUNDS) and few_bits not in FLOATS8:
            largest = other.tensors[linear.at.x].float().abs().amax(1, keepdim=True)
            weight = other.tensors[linear.at.weight][linear.rows.slice, linear.columns.slice]
            allowed = allowed + ROUNDED * largest * weight.abs().sum(1)
        assert bool(((actual - expected).abs() <= allowed).all()), linear.label
    native.close()


@pytest.mark.parametrize(
    "few_bits",
    ["int8:64", "int4:128", "int4:32", *KINDS, "int8:64:a8", "int4:64:a8", *ROUNDING_KINDS],
)
def test_bits_do_not_depend_on_the_path(few_bits: str) -> None:
    """Sums of blocks are exact. Only paths without fused products round more."""
    per_path = []
    for path in PATHS:
        memory = _filled(memory_of("tiny-qwen3", torch.bfloat16, 2, 5, odd=True, few_bits=few_bits))
        native = Native(memory, path)
        for number in _terms(memory):
            native.execute(number, unseen)
        outs = {memory.program.instructions[number].at.out for number in _terms(memory)}
        per_path.append([memory.tensors[out].clone() for out in sorted(outs)])
        native.close()
    fused = [terms for path, terms in zip(PATHS, per_path, strict=True) if path != "portable"]
    for terms in fused[1:]:
        assert all(map(torch.equal, terms, fused[0]))
    for first, last in zip(per_path[0], per_path[-1], strict=True):
        assert relative_error(first, last) < EXACT


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize(
    "few_bits", [f"{word}{ROUNDS}" for word in ("int4:64", "int4:128", "Q4_K", "Q5_K", "Q6_K")]
)
def test_the_largest_integers_are_added_exactly(few_bits: str, batch: int, path: str) -> None:
    """Kernels may add their products in fewer bits first, in which random ones have room."""
    memory = memory_of("tiny-qwen3", torch.bfloat16, 2, batch, wide=512, few_bits=few_bits)
    memory.tensors = copy.deepcopy(memory.tensors)  # other tests have these weights too
    for number in _terms(memory):
        instruction: Any = memory.program.instructions[number]
        memory.tensors[instruction.at.x].fill_(1)
        weight = memory.tensors[instruction.at.weight]
        for suffix in {weight.format.values.suffix, HIGH} & weight.parts.keys():
            weight.parts[suffix].fill_(-1)  # all bits
    for label, actual, expected in _sums(memory, path):
        assert relative_error(actual, expected) < EXACT, label


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few_bits", FLOATS8)
@pytest.mark.parametrize("small", ["none", "some", "all"])
def test_floats_of_8_bits_with_and_without_a_leading_one(
    small: str, few_bits: str, dtype: torch.dtype, path: str
) -> None:
    """Kernels load 128 columns faster if all have one. Those without one are 7/8 of 2**-6 or less.

    Blocks of columns begin within a group, and end before a load of 128 columns is full.
    """
    memory = memory_of("tiny-qwen3", dtype, 3, 5, wide=400, few_bits=few_bits)
    memory.tensors = copy.deepcopy(memory.tensors)  # other tests have these weights too
    generator = torch.Generator().manual_seed(0)
    for number in _terms(_filled(memory)):
        instruction: Any = memory.program.instructions[number]
        weight = memory.tensors[instruction.at.weight]
        numbers = weight.parts[weight.format.values.suffix].view(torch.uint8)
        low, high = (0, 8) if small == "all" else (8, 127)
        numbers.random_(low, high, generator=generator)
        if small == "some":
            places = torch.randint(numbers.shape[1], (len(numbers), 2), generator=generator)
            numbers.scatter_(1, places, torch.randint(8, places.shape, generator=generator).byte())
        numbers.add_(torch.randint(2, numbers.shape, generator=generator).mul(128).byte())
    for label, actual, expected in _sums(memory, path):
        largest = expected.abs().max()
        assert largest > 0
        assert bool(((actual - expected).abs() <= EXACT * largest).all()), label


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", *KINDS])
def test_embeddings_are_the_reference_s(kind: str, dtype: torch.dtype, path: str) -> None:
    """Also for tokens of the other ranks, which have terms of zeros."""
    for tp in (1, 3):
        memory = memory_of("tiny-qwen3", dtype, tp, 7, few_bits=kind)
        vocabulary = max(embed.at.first + embed.at.rows for embed in _embeds(memory))
        tokens = torch.arange(7) * (vocabulary - 1) // 6
        native = Native(memory, path)
        native.place(tokens, torch.ones(7).long(), torch.arange(7)[:, None])
        for embed in _embeds(memory):
            native.execute(memory.program.instructions.index(embed), unseen)
            actual = memory.tensors[embed.at.out].clone()
            embed.run(memory.tensors)
            assert torch.equal(actual, memory.tensors[embed.at.out]), embed.label
        native.close()


def _embeds(memory: StepMemory) -> list[Embed]:
    return [embed for embed in memory.program.instructions if isinstance(embed, Embed)]


def _steps(memory: StepMemory, path: str | None = None, machine: bool = False) -> torch.Tensor:
    """Run steps of sequences that begin with the same token; return the logits of each."""
    runner = Machine(memory) if machine else Native(memory, path)
    batch = memory.batch
    most = memory.extent(Role.TABLES, 1)
    tables = torch.arange(batch * most).reshape(batch, most)
    rows = []
    for length in range(1, 7):
        tokens = torch.full((batch,), 3 * length)
        runner.place(tokens, torch.full((batch,), length), tables)
        runner.run(1)
        rows.append(runner.logits.clone())
    runner.close()
    return torch.stack(rows)


@lru_cache
def _reference_steps(few_bits: str) -> torch.Tensor:
    memory = memory_of("tiny-qwen3", torch.float32, 2, 2, few_bits=few_bits)
    return _steps(memory, machine=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("few_bits", ["int8:32", "int4:64", *KINDS, *FLOATS8])
def test_steps_are_the_reference_s(few_bits: str, path: str) -> None:
    memory = memory_of("tiny-qwen3", torch.float32, 2, 2, few_bits=few_bits)
    assert relative_error(_steps(memory, path), _reference_steps(few_bits)) < EXACT


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("few_bits", "hidden"),
    [
        *product(("int8:row", "int4:32", *KINDS, *FLOATS8), (LONG,)),
        *product(("int8:64:a8", "int4:row:a8", "Q5_K:a8", "Q6_K:a8"), (LONG,)),
        *product(("int4:32", "int8:64", "int4:64:a8", "int4:128"), (1152,)),
    ],
)
def test_bits_do_not_depend_on_batch_workers_and_ranks(
    few_bits: str, hidden: int, path: str
) -> None:
    """1152 columns fill loads, and registers of blocks several times, the last time in part."""

    def steps(tp: int = 1, batch: int = 1, **options: Any) -> torch.Tensor:
        memory = memory_of(
            "tiny-qwen3", torch.bfloat16, tp, batch, hidden=hidden, few_bits=few_bits, **options
        )
        return _steps(memory, path)[:, 0]

    alone = steps()
    for batch in (*range(2, 10), 12, 16, 17):
        assert torch.equal(steps(batch=batch), alone), batch
    assert torch.equal(steps(workers=3), alone)


@pytest.mark.parametrize("path", PATHS)
def test_formats_with_kernels(path: str) -> None:
    """Others have groups of sizes that no file has."""
    bf16 = Format.of(torch.bfloat16)
    words = {
        **dict.fromkeys(("int8:row:bf16", "int4:32:f16", "int4:64:f16min", "int5:32:f16"), True),
        **dict.fromkeys(("int4:32:supermin", "int5:32:supermin", "int6:16:super"), True),
        **dict.fromkeys(("int4:48:bf16", "int5:64:f16", "int6:32:super", "int6:32:f16"), False),
        **dict.fromkeys(("int4:64:super", "int4:16:super", "int4:128:supermin"), False),
        **dict.fromkeys(("int4:32:supermin:a8", "int5:32:f16:a8", "int6:16:super:a8"), True),
    }
    supported = {
        word: has_kernel(
            path, torch.bfloat16, NormLmHead.opcode, bf16, Format.parsed(word), bf16, bf16
        )
        for word in words
    }
    assert supported == words


def test_groups_without_kernels_are_refused() -> None:
    memory = memory_of("tiny-qwen3", torch.bfloat16, 1, 1, few_bits="int4:48")
    with pytest.raises(UnsupportedError, match=r"no kernel for .*int4:48:bf16 weights"):
        Native(memory)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("few_bits", "columns"),
    [
        *product(("int8:64", "int4:32", "int4:64:a8", "int8:32", "int4:128"), (512,)),
        *product(("int4:32", *KINDS), (640,)),
        *product(("int4:32", "int4:64", "int4:64:a8", "Q4_0", "int4:128"), (448,)),
        *product(("Q5_1:a8", "Q6_K:a8", *FLOATS8), (512, 448)),
    ],
)
def test_sums_do_not_depend_on_the_batch(few_bits: str, columns: int, path: str) -> None:
    """In fp32, where parts of sums have several blocks. Kernels differ by the size of a batch.

    Parts of 512 columns have 8 groups of 64 and 16 of 32. Parts of 448 begin within a load of 128.
    Those of 640 have more blocks than lanes, and share registers of blocks.
    """

    def terms(batch: int) -> list[torch.Tensor]:
        memory = memory_of("tiny-qwen3", torch.bfloat16, 2, batch, wide=columns, few_bits=few_bits)
        for number in _terms(memory):
            instruction: Any = memory.program.instructions[number]
            held = memory.tensors[instruction.at.x]
            generator = torch.Generator().manual_seed(held.shape[1])
            held.copy_(torch.randn(8, held.shape[1], generator=generator)[:batch])
        native = Native(memory, path)
        for number in _terms(memory):
            native.execute(number, unseen)
        outs = {memory.program.instructions[number].at.out for number in _terms(memory)}
        values = [memory.tensors[out].clone() for out in sorted(outs)]
        native.close()
        return values

    eight = terms(8)
    assert eight and all(tensor.abs().amax(-1).min() > 0 for tensor in eight)
    for batch in range(1, 8):
        assert all(map(torch.equal, terms(batch), [tensor[:batch] for tensor in eight])), batch
