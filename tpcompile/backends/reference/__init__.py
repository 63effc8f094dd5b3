"""The reference machine, which runs a program on torch tensors in any order that it allows."""

from tpcompile.backends.reference.machine import Machine
from tpcompile.backends.reference.orders import held_back, in_program_order, shuffled

__all__ = ["Machine", "held_back", "in_program_order", "shuffled"]
