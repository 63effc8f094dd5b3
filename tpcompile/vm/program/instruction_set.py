"""The registry of instructions, and their encoding as the words that executors read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tpcompile.errors import UsageError
from tpcompile.registry import Registry
from tpcompile.vm.program.fields import operands_of, own_types
from tpcompile.vm.program.instruction import (
    StepInstruction,
    from_words,
    own_fields,
    word_count,
    words_of,
)

_LAST_OWN_OPCODE = 255
"""Instructions of other packages use opcodes above it."""
_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_Kind = TypeVar("_Kind", bound=type[StepInstruction])


class InstructionSet(Registry[type[StepInstruction]]):
    """The instructions by name and by opcode."""

    def __init__(self) -> None:
        super().__init__("instruction")
        self.by_opcode: dict[int, type[StepInstruction]] = {}
        """Opcode 0 is not used, so that a row of zeros is not a valid instruction."""
        self.words = 0
        """The words per row: enough for an opcode and the operands of any instruction."""

    def __iter__(self) -> Iterator[str]:
        return (self.by_opcode[opcode].name for opcode in sorted(self.by_opcode))

    def built_in(self) -> list[type[StepInstruction]]:
        """Return the instructions of this package, which alone may have kernels in C++."""
        return [kind for kind in self.values() if kind.opcode <= _LAST_OWN_OPCODE]

    def add(self, name: str, entry: type[StepInstruction]) -> None:
        if not _SNAKE.fullmatch(name):
            raise UsageError(
                f"The name of an instruction must be in snake case, got {name!r}",
                hint="Text, reports, C headers and kernels use this one spelling",
            )
        taken = self.by_opcode.get(entry.opcode, entry)
        if entry.opcode < 1 or taken is not entry:
            raise UsageError(
                f"The instruction {name} cannot have the opcode {entry.opcode}",
                got=f"{taken.name} with the same opcode" if taken is not entry else "",
                expected="an opcode above 0 that no other instruction has",
            )
        super().add(name, entry)
        self.by_opcode[entry.opcode] = entry
        self.words = max(self.words, 8 * -(-(1 + word_count(entry)) // 8))


INSTRUCTIONS = InstructionSet()


def instruction(kind: _Kind) -> _Kind:
    """Register an instruction class under its name and its opcode, and return it."""
    INSTRUCTIONS.add(kind.name, kind)
    return kind


def encode(
    step_instruction: StepInstruction, shared: dict[int, list[int]] | None = None
) -> list[int]:
    """Encode an instruction as a row of int32 words, padded with zeros.

    `shared` caches the words of operands by identity, for callers that encode many instructions.
    """
    shared = {} if shared is None else shared
    operands = step_instruction.at
    if id(operands) not in shared:
        shared[id(operands)] = list(words_of(operands))
    words = [step_instruction.opcode, *shared[id(operands)]]
    for _, value in own_fields(step_instruction):
        words += words_of(value)
    return words + [0] * (INSTRUCTIONS.words - len(words))


def decode(words: Sequence[int], shared: dict[Any, Any] | None = None) -> StepInstruction:
    """Decode a row of words.

    `shared` caches operands by their words, so that equal operands become one object.
    """
    shared = {} if shared is None else shared
    width, opcodes = INSTRUCTIONS.words, INSTRUCTIONS.by_opcode
    if len(words) != width or words[0] not in opcodes:
        known = ", ".join(f"{opcode} ({kind.name})" for opcode, kind in sorted(opcodes.items()))
        raise UsageError(
            "The words are not a valid instruction",
            got=f"{len(words)} words with the opcode {words[0] if words else 'missing'}",
            expected=f"{width} words with one of the opcodes {known}",
        )
    kind: Any = opcodes[words[0]]
    operand_words = list(words[1:])
    spare = operand_words[word_count(kind) :]
    if any(spare):
        raise UsageError(
            f"The words after the operands of {kind.name} must be zeros", got=str(spare)
        )
    operands = operands_of(kind)
    key = operands, tuple(operand_words[: word_count(operands)])
    own_words = iter(operand_words[word_count(operands) :])
    try:
        if key not in shared:
            shared[key] = from_words(operands, iter(operand_words))
        values = {n: from_words(inner, own_words) for n, inner in own_types(kind).items()}
    except ValueError as error:
        raise UsageError(
            f"The words are not valid operands of {kind.name}: {error}",
            expected="a value that the operand can have",
        ) from error
    decoded: StepInstruction = kind(shared[key], **values)
    return decoded
