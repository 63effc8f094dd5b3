"""The collectives of an emitted module over torch.distributed; each rank is a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.comm.neighbours import SMALL_BYTES, Neighbours, PeerError
from tpcompile.comm.shared import SharedExchange
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.argmax import best_of
from tpcompile.ir.ops.collectives import tree_sum

WHOLE_BYTES = 128 * 1024
"""Up to this size ranks send their whole terms. Measured with 4 ranks of one thread each: whole
terms take 1.4 ms at 4 KB and 16 ms at 1 MB, pieces 2.0 ms and 8 ms. The curves cross near
128 KB."""

_LAST_S = 0.3
"""The maximum time that a group may take to release its tensors when Python exits."""
_LOOK_S = 0.001


class ProcessGroupRank:
    """This process's rank of a torch process group, the default group or another one.

    On the CPU a sum has the same bits as `tree_sum`, whichever algorithm computes it. On other
    devices it is the group's own all-reduce. With `near`, ranks of one machine exchange values on
    the CPU over shared memory, or small ones over sockets.
    """

    def __init__(self, group: Any, near: Neighbours | SharedExchange | None = None) -> None:
        self._group = group
        self._shared = near if isinstance(near, SharedExchange) else None
        self._neighbours = near if isinstance(near, Neighbours) else None
        self._rank: int = group.rank()
        self._ranks: int = group.size()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._in_flight: tuple[torch.Tensor, ...] = ()

    def lost(self) -> bool:
        """Return whether another rank is known to have ended; only shared memory can tell."""
        return self._shared is not None and self._shared.lost()

    def all_reduce(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the sum of every rank's `x`, in `dtype`."""
        sum_dtype = dtype or x.dtype
        if self._ranks == 1:
            return x.to(sum_dtype, copy=True)
        if self._shared is not None and self._shared.adds(x.dtype, sum_dtype):
            return self._shared.all_reduce(x, sum_dtype)
        near = self._neighbours is not None and x.nbytes <= SMALL_BYTES
        if x.device.type != "cpu" or (not near and self._ranks == 2 and sum_dtype in _SUMMED_ALIKE):
            total = x.to(sum_dtype, copy=True, memory_format=torch.contiguous_format)
            self._wait(lambda x: self._group.allreduce([x]), total)
            return total
        if x.nbytes <= WHOLE_BYTES:
            terms = self._gather(x.contiguous().view(-1), scratch=True)
            return tree_sum(terms.unbind(), sum_dtype).view(x.shape)
        return self._sum_in_pieces(x, sum_dtype)

    def all_gather(
        self, x: torch.Tensor, dim: int, extents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Concatenate every rank's `x` along `dim`; without `extents`, exchange the sizes first."""
        sizes = self._sizes(x, dim) if extents is None else list(extents)
        if x.shape[dim] != sizes[self._rank]:
            raise ValueError(
                f"sizes along dim {dim} must be {sizes}, "
                f"rank {self._rank} has shape {tuple(x.shape)}"
            )
        if not x.shape[dim] and not any(sizes):
            return x.clone()
        width = x.numel() // x.shape[dim] if x.shape[dim] else _elements_per_index(x.shape, dim)
        flat = x.new_empty(max(sizes) * width)
        flat[: x.numel()] = x.reshape(-1)
        parts = []
        for size, part in zip(sizes, self._gather(flat), strict=True):
            shape = list(x.shape)
            shape[dim] = size
            parts.append(part[: size * width].view(shape))
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's run of tokens of the sum of every rank's `x`."""
        if self._ranks == 1:
            return x.to(dtype or x.dtype, copy=True)
        layout = TokenLayout(self._ranks)
        sum_dtype = dtype or x.dtype
        if self._shared is not None and self._shared.adds(x.dtype, sum_dtype):
            run = layout.run(self._rank, len(x))
            return self._shared.reduce_scatter(x, *run, sum_dtype)
        runs = [layout.run(rank, len(x)) for rank in range(self._ranks)]
        rows = [stop - start for start, stop in runs]
        local_rows = rows[self._rank]
        received = x.new_empty(self._ranks * local_rows, *x.shape[1:])
        self._exchange(received, x.contiguous(), [local_rows] * self._ranks, rows)
        return tree_sum(torch.split(received, local_rows) if local_rows else [received], dtype)

    def argmax(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the id of the greatest value in each row; each rank sends 16 bytes per row."""
        pairs = torch.stack([values.double().view(torch.int64), ids], -1)
        gathered = self._gather(pairs.view(-1)).view(self._ranks, len(values), 2)
        return best_of(gathered[..., 0].contiguous().view(torch.float64), gathered[..., 1])

    def broadcast(self, x: torch.Tensor | None, root: int, device: torch.device) -> torch.Tensor:
        """Return the `x` of rank `root` on every rank; the others need not know shape and dtype."""
        is_root = self._rank == root
        kind = torch.zeros(_KIND, dtype=torch.long)
        if is_root:
            assert x is not None
            kind[: 2 + x.dim()] = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape])
        kind = self._broadcast(kind.to(device), root).cpu()
        dtype, dims = _DTYPES[int(kind[0])], int(kind[1])
        received = torch.empty(kind[2 : 2 + dims].tolist(), dtype=dtype, device=device)
        if is_root:
            assert x is not None
            received.copy_(x.detach())
        if received.numel():
            self._broadcast(_bytes(received), root)
        return received

    def _broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._wait(lambda x: self._group.broadcast([x], options), x)
        return x

    def _sum_in_pieces(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum one piece per rank over all terms, then gather the sums."""
        piece = -(-x.numel() // self._ranks)
        flat = x.contiguous().view(-1)
        if piece * self._ranks != x.numel():
            flat = torch.nn.functional.pad(flat, (0, piece * self._ranks - x.numel()))
        terms = self._room(self._ranks, piece, x.dtype)
        self._exchange(terms.view(-1), flat, [], [])
        total = self._gather(tree_sum(terms.unbind(), dtype))
        return total.view(-1)[: x.numel()].view(x.shape)

    def _gather(self, flat: torch.Tensor, scratch: bool = False) -> torch.Tensor:
        """Gather the same number of elements from every rank: `[ranks, elements]`."""
        if scratch:
            gathered = self._room(self._ranks, len(flat), flat.dtype)
        else:
            gathered = flat.new_empty(self._ranks, len(flat))
        if self._shared is not None:
            self._shared.gather(_bytes(flat), _bytes(gathered))
            return gathered
        if self._neighbours is not None and flat.nbytes <= SMALL_BYTES:
            self._neighbours.gather(_bytes(flat), _bytes(gathered).view(self._ranks, -1))
            return gathered
        self._wait(self._group._allgather_base, _bytes(gathered), _bytes(flat))
        return gathered

    def _exchange(
        self, received: torch.Tensor, sent: torch.Tensor, take: list[int], give: list[int]
    ) -> None:
        """Send rows of `sent` to every rank, receive rows from each; empty sizes split evenly."""
        if not sent.numel():
            return
        width = sent.nbytes // len(sent)
        target, source = (_bytes(value).view(-1, width) for value in (received, sent))
        self._wait(lambda a, b: self._group.alltoall_base(a, b, take, give), target, source)

    def _sizes(self, x: torch.Tensor, dim: int) -> list[int]:
        extent = torch.tensor([x.shape[dim]], device=x.device)
        return [int(size) for size in self._gather(extent).view(-1)]

    def _room(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return scratch memory reused by every sum: new pages would cost more than the sum."""
        size = rows * columns * dtype.itemsize
        if len(self._scratch) < size:
            with torch.inference_mode(False):
                self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(dtype).view(rows, columns)

    def _wait(self, start: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Run a collective. Hold its tensors until the next one, and while the group uses them.

        The group's own thread releases them a moment after `wait` returns. If it held the last
        reference it would need the GIL. That costs time, and fails when Python is exiting, which
        aborts the process.
        """
        try:
            start(*tensors).wait()
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            raise PeerError(
                "Another rank did not answer in time"
                if late
                else "The connection to another rank was lost",
                got="the error: " + str(error).split("\n")[0],
                hint="See the output of the other ranks: one of them failed first",
            ) from error
        finally:
            self._in_flight = (*filter(_in_use, self._in_flight), *tensors)

    def wait_for_release(self) -> None:
        """Wait until the group's own threads have released all tensors; see `_wait`.

        They do so a moment after the last collective; without one, this returns at once.
        """
        until = time.monotonic() + _LAST_S
        waiting = any(tensor.device.type == "cpu" for tensor in self._in_flight)
        while waiting and time.monotonic() < until:
            waiting = any(map(_in_use, self._in_flight))
            time.sleep(_LOOK_S)  # also after the last check: the releasing thread needs the GIL


_SUMMED_ALIKE = (torch.float32, torch.float64)
"""Dtypes in which the group's own sum has the same bits: two ranks have one order only."""

_KIND = 10
"""The integers in the header of a broadcast: dtype, dimensions, and at most 8 extents."""

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def _in_use(x: Any) -> bool:
    """Return whether a thread of gloo still holds the tensor, in addition to Python."""
    return bool(x.device.type == "cpu" and x._use_count() > 1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _elements_per_index(shape: torch.Size, dim: int) -> int:
    """Return the number of elements per index along `dim`, for an empty value."""
    return torch.Size(s for i, s in enumerate(shape) if i != dim % len(shape)).numel()
