"""The instructions of a decode step, and the numbers that executors know them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.vm.instructions.attention import AttentionReduce, PartialAttention
from tpcompile.vm.instructions.embed import Embed
from tpcompile.vm.instructions.head import Argmax, NormLmHead
from tpcompile.vm.instructions.mlp import NormGateUpSwiglu
from tpcompile.vm.instructions.project import AllReduce, LinearResidual, LinearTerms
from tpcompile.vm.instructions.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    field_types,
    from_words,
    own_fields,
    unseen,
    word_count,
    words_of,
)

INSTRUCTIONS: tuple[type[StepInstruction], ...] = (
    Embed,
    NormQkvRopeAppend,
    NormQkvRows,
    PartialAttention,
    AttentionReduce,
    LinearResidual,
    LinearTerms,
    AllReduce,
    NormGateUpSwiglu,
    NormLmHead,
    Argmax,
)
"""In the order of their opcodes, the first of which is 1: words of zeros are no instruction."""

OPCODES: dict[type[StepInstruction], int] = {
    kind: opcode for opcode, kind in enumerate(INSTRUCTIONS, start=1)
}
WORDS = 8 * -(-(1 + max(map(word_count, INSTRUCTIONS))) // 8)
"""The words of every instruction, the opcode first; what it does not need is zero."""


def encode(instruction: StepInstruction, shared: dict[int, list[int]] | None = None) -> list[int]:
    """The int32 words that an executor reads.

    `shared` keeps the words of operands by their identity, for those who encode many.
    """
    shared = {} if shared is None else shared
    at = instruction.at
    if id(at) not in shared:
        shared[id(at)] = list(words_of(at))
    words = [OPCODES[type(instruction)], *shared[id(at)]]
    for _, value in own_fields(instruction):
        words += words_of(value)
    return words + [0] * (WORDS - len(words))


def decode(words: Sequence[int], shared: dict[Any, Any] | None = None) -> StepInstruction:
    """The instruction that has these words.

    `shared` stores operands by their words, so that equal ones become one object.
    """
    shared = {} if shared is None else shared
    if len(words) != WORDS or not 1 <= words[0] <= len(INSTRUCTIONS):
        raise UsageError(
            "These words are no instruction",
            got=f"{len(words)} words, the first {words[0] if words else 'missing'}",
            expected=f"{WORDS} words, the first an opcode from 1 to {len(INSTRUCTIONS)}",
        )
    kind: Any = INSTRUCTIONS[words[0] - 1]
    rest = list(words[1:])
    spare = rest[word_count(kind) :]
    if any(spare):
        raise UsageError(
            f"Words behind the operands of {kind.name}", got=str(spare), expected="zeros"
        )
    operands: Any = dict(field_types(kind))["at"]
    key = operands, tuple(rest[: word_count(operands)])
    own = iter(rest[word_count(operands) :])
    try:
        if key not in shared:
            shared[key] = from_words(operands, iter(rest))
        values = {n: from_words(inner, own) for n, inner in field_types(kind) if n != "at"}
    except ValueError as error:
        raise UsageError(
            f"These words are not the operands of {kind.name}",
            got=str(error),
            expected="a value that the operand can have",
        ) from error
    found: StepInstruction = kind(shared[key], **values)
    return found


__all__ = [
    "INSTRUCTIONS",
    "NONE",
    "OPCODES",
    "WORDS",
    "AllReduce",
    "Argmax",
    "AttentionReduce",
    "Embed",
    "LinearResidual",
    "LinearTerms",
    "Memory",
    "NormGateUpSwiglu",
    "NormLmHead",
    "NormQkvRopeAppend",
    "NormQkvRows",
    "PartialAttention",
    "Probe",
    "Range",
    "StepInstruction",
    "decode",
    "encode",
    "unseen",
]
