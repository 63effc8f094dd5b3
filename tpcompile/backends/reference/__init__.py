"""The reference machine: runs a program's instructions on torch tensors, in any order it allows."""

from tpcompile.backends.reference.machine import Machine
from tpcompile.backends.reference.orders import held_back, in_program_order, shuffled

__all__ = ["Machine", "held_back", "in_program_order", "shuffled"]
