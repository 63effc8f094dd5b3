"""The memory of the decode steps of a program: its buffers, inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.vm.program import Buffer, Program
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.operands import verify_operands

_UNWRITTEN = -(2**31)
"""The value of integers that have not been written."""


class StepMemory:
    """The buffers of a program on one or several ranks, and the inputs and results in them.

    With `poison`, memory that has not been written is NaN: if an instruction reads a value too
    early, or a token outside the sequence, the result is visibly wrong.
    """

    def __init__(
        self,
        program: Program,
        parameter: Callable[[int, str], torch.Tensor],
        rotary: Callable[..., Any],
        caches: Sequence[torch.Tensor] | None = None,
        *,
        poison: bool = True,
    ) -> None:
        """Allocate the buffers of a program.

        `parameter` returns a rank's tensors by name. `caches` is the KV cache of each rank, in
        blocks; empty caches are allocated if it is not given.

        The program need not be verified. Operands that do not agree with its buffers are refused
        here, because regions and the checks of inputs depend on them.
        """
        verify_operands(program)
        self.program = program
        self._numbers: dict[str, list[int]] = {}
        for number, buffer in enumerate(program.buffers):
            self._numbers.setdefault(buffer.name, []).append(number)
        self._own_caches, self._poisons = caches is None, poison
        self.tensors = [self._first(buffer, parameter) for buffer in program.buffers]
        """The tensor of each buffer."""
        self._make_tables(rotary)
        if caches is not None:
            self.use_caches(caches)

    def _first(self, buffer: Buffer, parameter: Callable[[int, str], torch.Tensor]) -> torch.Tensor:
        """Return the initial contents of a buffer. Caches from the caller are not allocated."""
        if buffer.kind == "weight":
            return _checked(parameter(buffer.rank, buffer.name), buffer)
        if buffer.kind == "cache" and not self._own_caches:
            return torch.empty(0)
        found = torch.zeros(buffer.storage or buffer.shape, dtype=buffer.dtype)
        return found if buffer.kind in ("state", "input") else self._poison(found)

    def use_caches(self, caches: Sequence[torch.Tensor]) -> None:
        """Store K and V in these caches from now on. The caches may have any number of slots."""
        for number, cache in zip(self._numbers["cache"], caches, strict=True):
            buffer = self.program.buffers[number]
            assert buffer.storage is not None
            wanted = buffer.storage[:2] + buffer.storage[3:]
            if (tuple(cache.shape[:2] + cache.shape[3:]), cache.dtype) != (wanted, buffer.dtype):
                raise UsageError(
                    "The KV cache does not fit this program",
                    got=f"{tuple(cache.shape)} in {cache.dtype}",
                    expected=f"{buffer.storage} in {buffer.dtype}, with any number of slots",
                )
            self.tensors[number] = cache

    def values(self, name: str) -> list[torch.Tensor]:
        """Return the buffers of this name, by rank."""
        return [self.tensors[number] for number in self._numbers[name]]

    @property
    def batch(self) -> int:
        """The maximum number of sequences."""
        return self._extent("tokens", 0)

    @property
    def longest(self) -> int:
        """The maximum number of tokens per sequence."""
        return self._extent("cos", 0)

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, `[batch, vocabulary]`."""
        return torch.cat(self.values("logits"), 1)

    def place(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        """Set the inputs of the next step: one new token per sequence, which `lengths` includes.

        The tokens before it are in the cache, in the blocks of `tables`. Its position is
        `lengths - 1` unless `positions` is given. A sequence ends when it gets one of `stops`.
        """
        positions = lengths - 1 if positions is None else positions
        self._check(tokens, lengths, tables, positions, stops)
        given = {"tokens": tokens, "lengths": lengths, "positions": positions}
        for name, value in given.items():
            self._set(name, value, NONE if name == "tokens" else 0)
        self._set("tables", tables, NONE)
        self._set("stops", torch.tensor(stops, dtype=torch.int32), NONE)
        for name in ("clock", "finished"):
            self._set(name, torch.tensor([], dtype=torch.int32), 0)
        if self._own_caches and self._poisons:
            self._poison_caches(lengths, tables)

    def begin(self, steps: int) -> None:
        """Check that there is room for `steps` steps, and start counting them."""
        self._check_steps(steps)
        self._set("clock", torch.tensor([], dtype=torch.int32), 0)

    def forget(self) -> None:
        """Poison the scratch buffers, whose contents no step may take from the one before."""
        if self._poisons:
            for buffer, tensor in zip(self.program.buffers, self.tensors, strict=True):
                if buffer.kind == "scratch":
                    self._poison(tensor)

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return bool(self._ended().all())

    def tokens(self, steps: int) -> torch.Tensor:
        """Return the tokens of the first steps of a launch, `[steps, batch]`."""
        return self.values("history")[0][:steps].clone()

    def _ended(self) -> torch.Tensor:
        return (self.values("finished")[0] != 0) | (self.values("lengths")[0] == 0)

    def _extent(self, name: str, dim: int) -> int:
        return self.program.buffers[self._numbers[name][0]].shape[dim]

    def _set(self, name: str, value: torch.Tensor, rest: int) -> None:
        for held in self.values(name):
            held.fill_(rest)
            held[tuple(slice(0, extent) for extent in value.shape)] = value.to(held.dtype)

    def _check(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor,
        stops: Sequence[int],
    ) -> None:
        if not len(tokens) == len(lengths) == len(positions) == len(tables) >= 1:
            raise UsageError(
                "A step takes one token, position, length and table per sequence",
                got=f"{len(tokens)} tokens, {len(positions)} positions, {len(lengths)} lengths, "
                f"{len(tables)} tables",
            )
        _at_most("number of sequences", len(tokens), self.batch, "batch")
        _at_most("length of a sequence", int(lengths.max()), self.longest, "max_seq_len")
        _at_most("position of a token", int(positions.max()), self.longest - 1, "max_seq_len - 1")
        _at_most(
            "number of blocks per sequence",
            tables.shape[1],
            self._extent("tables", 1),
            "most_blocks",
        )
        _at_most("number of stop tokens", len(stops), self._extent("stops", 0), "stops")
        if int(lengths.min()) < 1 or int(positions.min()) < 0:
            raise UsageError(
                "A sequence has no tokens, or a position is negative",
                got=f"lengths {lengths.tolist()}, positions {positions.tolist()}",
                expected="lengths of at least 1 and positions of at least 0",
            )
        vocabulary = sum(logits.shape[1] for logits in self.values("logits"))
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise UsageError(
                "A token is not in the model's vocabulary",
                got=str(tokens.tolist()),
                expected=f"tokens from 0 to {vocabulary - 1}",
            )
        self._check_blocks(lengths, tables)

    def _check_steps(self, steps: int) -> None:
        if steps < 1:
            raise UsageError(f"steps must be at least 1, got {steps}")
        _at_most("number of steps in one launch", steps, self._extent("history", 0), "steps")
        going = ~self._ended()
        last = (self.values("lengths")[0] + steps - 1) * going
        _at_most("final length of a sequence", int(last.max()), self.longest, "max_seq_len")
        places = (self.values("positions")[0] + steps - 1) * going
        _at_most("final position", int(places.max()), self.longest - 1, "max_seq_len - 1")
        self._check_blocks(last, self.values("tables")[0])

    @property
    def _block(self) -> int:
        """The tokens per block of the KV cache."""
        sequences, most = self.program.buffers[self._numbers["tables"][0]].shape
        storage = self.program.buffers[self._numbers["cache"][0]].storage
        assert storage is not None
        return storage[2] // (sequences * most)

    def _check_blocks(self, lengths: torch.Tensor, tables: torch.Tensor) -> None:
        """Raise if a token has no valid block. A wrong block would corrupt another sequence."""
        blocks = self.values("cache")[0].shape[2] // self._block
        for row, (length, table) in enumerate(zip(lengths.tolist(), tables.tolist(), strict=True)):
            held = table[: -(-length // self._block)]
            if len(held) * self._block < length or not all(0 <= one < blocks for one in held):
                raise UsageError(
                    f"Sequence {row} lacks blocks for its {length} tokens",
                    got=f"blocks {held} of {self._block} tokens each",
                    expected=f"enough blocks, with numbers from 0 to {blocks - 1}",
                )

    def _make_tables(self, rotary: Callable[..., Any]) -> None:
        """Compute the rotation of every position. Raise if it depends on the sequence length."""
        buffer = self.program.buffers[self._numbers["cos"][0]]
        longest, width = buffer.shape
        tables = rotary(torch.arange(longest), width, buffer.dtype)
        alone = rotary(torch.zeros(1, dtype=torch.long), width, buffer.dtype)
        if not all(torch.equal(one, whole[:1]) for one, whole in zip(alone, tables, strict=True)):
            raise UnsupportedError(
                "The rotation tables of the model depend on the sequence length",
                expected="the same tables for every length up to max_seq_len",
                hint="Choose a max_seq_len below the length at which its rope type changes",
            )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            for number in self._numbers[name]:
                self.tensors[number] = table

    def _poison_caches(self, lengths: torch.Tensor, tables: torch.Tensor) -> None:
        """Fill unused slots with NaN, including those of the new tokens."""
        block = self._block
        for cache in self.values("cache"):
            free = torch.ones(cache.shape[2], dtype=torch.bool)
            for length, table in zip(lengths.tolist(), tables.tolist(), strict=True):
                for place in range(length - 1):
                    free[table[place // block] * block + place % block] = False
            cache[:, :, free] = torch.nan

    def _poison(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._poisons:
            return tensor
        return tensor.fill_(torch.nan if tensor.is_floating_point() else _UNWRITTEN)


def _at_most(what: str, found: int, most: int, name: str) -> None:
    if found > most:
        raise UsageError(
            f"The {what} is {found}",
            expected=f"at most {most}, the program's {name}",
            hint="Make a program with a larger limit",
        )


def _checked(value: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    if (tuple(value.shape), value.dtype) != (buffer.shape, buffer.dtype):
        raise UsageError(
            f"The parameter {buffer.name} of rank {buffer.rank} does not fit this program",
            got=f"{tuple(value.shape)} in {value.dtype}",
            expected=f"{buffer.shape} in {buffer.dtype}",
        )
    return value
