"""The shape of each instruction: the constants of its tile body, which branches give by name."""

from collections import namedtuple

from tpcompile.backends.triton.branches import CONSTANTS

globals().update({name: namedtuple(name, constants) for name, constants in CONSTANTS.items()})
