"""Small int32 tensors on a device, with copies that the host reads and writes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate
from math import prod
from typing import Generic, TypeVar

import torch

_ALIGNED = 4
"""The alignment of each tensor in elements, which kernels rely on: 16 bytes."""
Key = TypeVar("Key", bound=Hashable)


class HostCopies(Generic[Key]):
    """Tensors by key, on the host and on a device. One transfer copies all of them.

    On the CPU both are the same tensors, unless `apart`.
    """

    def __init__(
        self,
        shapes: Mapping[Key, tuple[int, ...]],
        device: torch.device,
        *,
        apart: bool = False,
    ) -> None:
        sizes = [-(-prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes.values()]
        on_gpu = device.type != "cpu"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        copied = on_gpu or apart
        self._device = torch.zeros_like(self._host, device=device) if copied else self._host
        starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))

        def views(whole: torch.Tensor) -> dict[Key, torch.Tensor]:
            return {
                key: whole[starts[key] : starts[key] + prod(shape)].view(shape)
                for key, shape in shapes.items()
            }

        self.host = views(self._host)
        """The tensors on the host."""
        self.device = views(self._device)
        """The tensors on the device."""

    def upload(self) -> None:
        """Copy all tensors to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Wait for the device, and copy all tensors to the host."""
        if self._device is not self._host:
            self._host.copy_(self._device)
