"""Tests of tensors on a device with copies on the host."""

from __future__ import annotations

import torch

from tests.backends.reference.step_models import ONE_LAYER
from tests.backends.reference.stepping import Case, place
from tpcompile.backends.host_copies import HostCopies
from tpcompile.backends.reference import Machine
from tpcompile.backends.rotation import CPU
from tpcompile.backends.triton import Triton

CASE = Case(ONE_LAYER, tp=2, lengths=(9,))
SHAPES = {"a": (3,), "b": (2, 3), "c": (1,)}


def test_one_transfer_copies_all_tensors() -> None:
    copies = HostCopies(SHAPES, CPU, apart=True)
    for number, tensor in enumerate(copies.host.values()):
        tensor.fill_(number + 1)
    assert not any(bool(tensor.any()) for tensor in copies.device.values())
    copies.upload()
    for name, tensor in copies.device.items():
        assert torch.equal(tensor, copies.host[name]) and tensor.shape == SHAPES[name]
        tensor += 10
    copies.download()
    assert [int(tensor.flatten()[-1]) for tensor in copies.host.values()] == [11, 12, 13]


def test_tensors_are_aligned() -> None:
    """Kernels rely on addresses that 16 divides."""
    copies = HostCopies(SHAPES, CPU)
    first = copies.device["a"].data_ptr()
    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in copies.device.values())


def test_on_the_cpu_they_are_the_same_tensors() -> None:
    copies = HostCopies(SHAPES, CPU)
    copies.host["b"].fill_(7)
    assert torch.equal(copies.device["b"], copies.host["b"])


def test_executors_use_the_tensors_of_the_device() -> None:
    """Steps give the same tokens if inputs and results must be transferred, as on a GPU."""
    for kind in (Machine, Triton):
        near, apart = kind(CASE.memory()), kind(CASE.memory(apart=True))
        place(near, CASE)
        place(apart, CASE)
        for steps in (2, 1):
            assert torch.equal(apart.run(steps), near.run(steps))
        assert torch.equal(apart.logits, near.logits)
        assert torch.equal(apart.memory.ended(), near.memory.ended())
