"""The memory of the decode steps of a program: its buffers, inputs and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from tpcompile.backends.host_copies import HostCopies
from tpcompile.backends.rotation import CPU, Rotation
from tpcompile.backends.share import RankShare
from tpcompile.backends.step_checks import (
    check_clocks,
    check_launch,
    check_states,
    check_step,
    sequence_rows_of,
)
from tpcompile.errors import UsageError
from tpcompile.huge_pages import allocated
from tpcompile.ir.format import Format
from tpcompile.ir.kv import nan_element
from tpcompile.vm.program import Buffer, Program, Role
from tpcompile.vm.program.abi import buffer_row
from tpcompile.vm.program.buffer import LINEAR_STATES, STORED_DIMS
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.operands import verify_operands
from tpcompile.vm.program.weight import Weight

_UNWRITTEN, _UNWRITTEN_BYTE = -(2**31), -(2**7)
"""The value of integers that have not been written, of several bytes or of one."""
_MATRIX = 2
_OF_HOST = frozenset(
    (
        *(Role.TOKENS, Role.POSITIONS, Role.LENGTHS, Role.TABLES, Role.STOPS),
        *(Role.FINISHED, Role.CLOCK, Role.HISTORY, Role.READ, Role.WRITE),
    )
)
"""The roles of inputs and results, of which the host has copies."""


class StepMemory:
    """The buffers of a program, and the inputs and results in them.

    It holds the buffers of all ranks, or with `share` only those of one rank and the shared ones.
    They are on `device`. The host has copies of inputs and results, so a launch needs one transfer
    in each direction; on the CPU the copies are the buffers themselves, unless `apart`.

    With `poison`, memory that has not been written is NaN: if an instruction reads a value too
    early, or a token outside the sequence, the result is visibly wrong.
    """

    def __init__(
        self,
        program: Program,
        parameter: Callable[[int, str], torch.Tensor],
        rotation: Rotation,
        caches: Sequence[torch.Tensor] | None = None,
        states: Sequence[Mapping[str, torch.Tensor]] = (),
        *,
        share: RankShare | None = None,
        poison: bool = True,
        device: torch.device = CPU,
        apart: bool = False,
    ) -> None:
        """Allocate the buffers of a program.

        `parameter` returns a rank's tensors by name. `rotation` is the result of `rotation_of`.
        `caches` is the KV cache of each rank here, in blocks; empty caches are allocated if it is
        not given. `states` are the states of linear attention of each rank, by the names of their
        roles, if the program has any.

        The program need not be verified. Operands that do not agree with its buffers, and steps
        with several ends, are refused here, because regions and the checks of inputs depend on
        them.
        """
        verify_operands(program)
        check_clocks(program)
        for role in _OF_HOST & program.roles:
            program.one_per_rank(role)
        self.program, self.share, self.device = program, share, device
        self.ranks = range(program.ranks) if share is None else (share.rank,)
        """The ranks whose buffers are here."""
        self._own_caches, self._poisons = caches is None, poison
        self.sequence_rows = sequence_rows_of(program)
        """The number of rows, from each of its multiples on, that may belong to a sequence."""
        self.starts: Sequence[int] = (0,)
        """The first row of each sequence, and the number of rows."""
        shapes = {
            number: buffer.extents
            for number, buffer in enumerate(program.buffers)
            if buffer.role in _OF_HOST and buffer.rank in self.ranks and number not in self._shared
        }
        self._copies = HostCopies(shapes, device, apart=apart)
        self._placed = False
        """Whether the inputs have been checked since the last launch, and with these caches."""
        self.tensors = [self._first(number, parameter) for number in range(len(program.buffers))]
        """The tensor of each buffer, empty for buffers of ranks that are not here."""
        for role, table in zip((Role.COS, Role.SIN), rotation, strict=True):
            for number in self._numbers(role):
                buffer = program.buffers[number]
                self.tensors[number] = _checked(table, buffer, buffer.extents).to(device)
        if caches is not None:
            self.use_caches(caches, states)

    def _first(self, number: int, parameter: Callable[[int, str], torch.Tensor]) -> Any:
        """Return the initial contents of a buffer. Caches from the caller are not allocated."""
        buffer = self.program.buffers[number]
        if buffer.rank not in self.ranks or buffer.role in (Role.COS, Role.SIN):
            return self._shared.get(number, torch.empty(0, dtype=buffer.dtype))
        if number in self._shared:
            return self._poison(self._shared[number])
        if number in self._copies.device:
            return self._copies.device[number]
        if buffer.role == Role.WEIGHT:
            if buffer.format is None:
                tensor = _matrix(parameter(buffer.rank, buffer.name), buffer)
                return _checked(tensor, buffer, buffer.extents)
            return _weight(buffer, buffer.format, parameter)
        if buffer.role in STORED_DIMS and not self._own_caches:
            return torch.empty(0, dtype=buffer.dtype)
        extents = buffer.extents
        strides = buffer.strides(extents)
        if buffer.role in STORED_DIMS:
            numbers = allocated((math.prod(extents),), buffer.dtype, self.device)
            tensor = numbers.as_strided(extents, strides)
            return tensor.fill_(nan_element(tensor) if self._poisons else 0)
        tensor = torch.empty_strided(
            extents, strides, dtype=buffer.dtype, device=self.device
        ).zero_()
        return tensor if buffer.role.kind in ("state", "input") else self._poison(tensor)

    @property
    def _shared(self) -> Mapping[int, torch.Tensor]:
        return {} if self.share is None else self.share.tensors

    def _numbers(self, role: Role) -> Sequence[int]:
        """Return the buffers of this role on the ranks that are here."""
        numbers = self.program.one_per_rank(role)
        return numbers if self.share is None else (numbers[self.share.rank],)

    def use_caches(
        self, caches: Sequence[torch.Tensor], states: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> None:
        """Store K and V in these caches, and states in these tensors, from now on.

        The caches may have any number of slots, and the tensors any number of states.
        """
        for role in self.program.roles.intersection(LINEAR_STATES):
            for number, rank_states in zip(self._numbers(role), states, strict=True):
                tensor, buffer = rank_states[role.word], self.program.buffers[number]
                extents = (buffer.extents[0], tensor.shape[1], *buffer.extents[2:])
                self.tensors[number] = _checked(tensor, buffer, extents)
        for number, cache in zip(self._numbers(Role.CACHE), caches, strict=True):
            if cache is self.tensors[number]:
                continue
            self._placed = False
            buffer = self.program.buffers[number]
            assert buffer.storage is not None
            slots = cache.shape[2] if cache.dim() == len(buffer.storage) else buffer.storage[2]
            extents = (*buffer.extents[:2], slots, *buffer.extents[3:])
            self.tensors[number] = _checked(cache, buffer, extents)

    def values(self, role: Role) -> list[torch.Tensor]:
        """Return the tensor of this role on each rank that is here; for inputs, the host's copy."""
        numbers = self._numbers(role)
        return [self._copies.host.get(number, self.tensors[number]) for number in numbers]

    def table(self) -> torch.Tensor:
        """Return the table of buffers for executors outside of Python: see `abi.COLUMNS`."""
        pairs = zip(self.program.buffers, self.tensors, strict=True)
        return torch.tensor([buffer_row(buffer, tensor, self.block) for buffer, tensor in pairs])

    @cached_property
    def batch(self) -> int:
        """The maximum number of sequences."""
        return self.extent(Role.TOKENS, 0)

    @cached_property
    def longest(self) -> int:
        """The maximum number of tokens per sequence."""
        return self.extent(Role.COS, 0)

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary, over the logits of all ranks."""
        logits = self.program.one_per_rank(Role.LOGITS)
        return sum(self.program.buffers[number].shape[1] for number in logits)

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, `[batch, vocabulary]`; of one rank, its columns."""
        return torch.cat(self.values(Role.LOGITS), 1)

    def hand_over_logits(self) -> torch.Tensor:
        """Return the logits of the last step as a tensor that later steps do not write.

        If one buffer here holds all of them, no value is copied: the buffer gets a new tensor.
        """
        number, *remaining = self._numbers(Role.LOGITS)
        if remaining or number in self._shared:
            return self.logits
        logits: torch.Tensor = self.tensors[number]
        self.tensors[number] = torch.empty_like(logits)
        return logits

    def place(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor | None = None,
        stops: Sequence[int] = (),
        ended: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
        write: torch.Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Set the inputs of the next step: one new token per row, which `lengths` includes.

        The tokens before it are in the cache, in the blocks of `tables`. Unless `positions` is
        given, its position is `lengths - 1`. The rows from each of `starts` up to the next belong
        to one sequence; by default, each row is a sequence. A sequence ends when it gets one of
        `stops`; sequences with a true `ended` have ended before. If the program has states, a
        sequence resumes from state `read`, and the state after its new token is `write`; without
        them, each sequence keeps a state of its own.
        """
        self._placed = False
        positions = lengths - 1 if positions is None else positions
        self.starts = range(len(tokens) + 1) if starts is None else starts
        check_step(self, tokens, lengths, tables, positions, self.starts, stops)
        inputs = {Role.TOKENS: tokens, Role.LENGTHS: lengths, Role.POSITIONS: positions}
        for role, value in inputs.items():
            self._set(role, value, NONE if role == Role.TOKENS else 0)
        self._set(Role.TABLES, tables, NONE)
        self._set(Role.STOPS, torch.tensor(stops) if stops else None, NONE)
        self._set(Role.FINISHED, ended, 0)
        if not self.program.roles.isdisjoint(LINEAR_STATES):
            default_states = torch.arange(len(tokens))
            read, write = (default_states if states is None else states for states in (read, write))
            check_states(self, self.starts, lengths, read, write)
            self._set(Role.READ, read, 0)
            self._set(Role.WRITE, write, 0)
        self._placed = True
        if self._own_caches and self._poisons:
            self._poison_caches(lengths, tables)

    def begin(self, steps: int) -> None:
        """Raise unless there is room for `steps` steps, and reset the clock."""
        if steps != 1 or not self._placed:
            check_launch(self, self.starts, steps)
        self._placed = False
        self._set(Role.CLOCK, None, 0)

    def upload(self) -> None:
        """Copy the inputs to the device."""
        self._copies.upload()

    def download(self) -> None:
        """Wait for the device, and copy inputs and results from it."""
        self._copies.download()

    def forget(self) -> None:
        """Poison the scratch buffers: a step must not read values of the previous step.

        Shared buffers stay as they are, because other ranks may still be reading them.
        """
        for number, (buffer, tensor) in enumerate(
            zip(self.program.buffers, self.tensors, strict=True)
        ):
            if buffer.role.kind == "scratch" and number not in self._shared:
                self._poison(tensor)

    def turns(self) -> Iterator[int]:
        """Return the instruction numbers of the ranks that are here, in sequential order.

        If other ranks are in other processes, each number is yielded when its waits are met, and
        its instruction counts as done when the next one is requested.
        """
        if self.share is not None:
            return self.share.order(self.program)
        return iter(range(len(self.program.instructions)))

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return bool(self.ended().all())

    def tokens(self, steps: int) -> torch.Tensor:
        """Return the tokens of the first steps of a launch, `[steps, batch]`."""
        return self.values(Role.HISTORY)[0][:steps].clone()

    def ended(self) -> torch.Tensor:
        """Return which rows have ended or are empty."""
        return (self.values(Role.FINISHED)[0] != 0) | (self.values(Role.LENGTHS)[0] == 0)

    def extent(self, role: Role, dim: int) -> int:
        """Return an extent of the buffers of a role."""
        return self._buffer(role).shape[dim]

    def _buffer(self, role: Role) -> Buffer:
        """Return rank 0's buffer of a role."""
        return self.program.buffers[self.program.one_per_rank(role)[0]]

    def _set(self, role: Role, value: torch.Tensor | None, padding: int) -> None:
        """Write `value` at the start of a buffer on every rank, and `padding` after it."""
        for tensor in self.values(role):
            if value is None or value.shape != tensor.shape:
                tensor.fill_(padding)
            if value is not None:
                tensor[tuple(slice(extent) for extent in value.shape)].copy_(value)

    @cached_property
    def block(self) -> int:
        """The tokens per block of the KV cache."""
        sequences, most = self._buffer(Role.TABLES).shape
        storage = self._buffer(Role.CACHE).storage
        assert storage is not None
        return storage[2] // (sequences * most)

    def _poison_caches(self, lengths: torch.Tensor, tables: torch.Tensor) -> None:
        """Fill unused slots with NaN, including those of the new tokens."""
        block = self.block
        for cache in self.values(Role.CACHE):
            free = torch.ones(cache.shape[2], dtype=torch.bool)
            for length, table in zip(lengths.tolist(), tables.tolist(), strict=True):
                for place in range(length - 1):
                    free[table[place // block] * block + place % block] = False
            for length, table in zip(lengths.tolist(), tables.tolist(), strict=True):
                number, place = divmod(length - 1, block)
                free[table[number] * block + place] = True
            cache[:, :, free.to(cache.device)] = nan_element(cache)

    def _poison(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._poisons:
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(_UNWRITTEN if tensor.itemsize > 1 else _UNWRITTEN_BYTE)


def _weight(buffer: Buffer, stored: Format, parameter: Callable[[int, str], torch.Tensor]) -> Any:
    """Return a weight of several components."""
    parts = {}
    for part in stored.components:
        shape, name = buffer.extents_of(part), buffer.name + part.suffix
        component = Buffer(name, shape, part.dtype.torch, buffer.rank)
        parts[part.suffix] = _checked(
            _matrix(parameter(buffer.rank, name), component), component, shape
        )
    return Weight(stored, parts, buffer.columns)


def _matrix(value: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """Return the rows of all experts as those of one matrix, if the buffer is one."""
    return value.flatten(0, -2) if value.dim() > len(buffer.shape) == _MATRIX else value


def _checked(value: torch.Tensor, buffer: Buffer, extents: tuple[int, ...]) -> torch.Tensor:
    if (tuple(value.shape), value.dtype) != (extents, buffer.dtype):
        raise UsageError(
            f"The {_description(buffer)} must have the shape and dtype of its buffer",
            got=f"{tuple(value.shape)} in {value.dtype}",
            expected=f"{extents} in {buffer.dtype}",
        )
    if not buffer.has_strides(value):
        raise UsageError(
            f"The {_description(buffer)} must have the memory layout of its buffer",
            got=f"strides {value.stride()} of {tuple(value.shape)}",
            expected=f"strides {buffer.strides(extents)}",
        )
    return value


def _description(buffer: Buffer) -> str:
    subject = "KV cache" if buffer.role == Role.CACHE else f"parameter {buffer.name}"
    return f"{subject} of rank {buffer.rank}"
