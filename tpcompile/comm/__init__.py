"""Communication between ranks: in one process, over torch.distributed, over sockets."""

from tpcompile.comm.group import Group, SimulatedGroup
from tpcompile.comm.neighbours import Neighbours, PeerError
from tpcompile.comm.process_group import ProcessGroupRank

__all__ = ["Group", "Neighbours", "PeerError", "ProcessGroupRank", "SimulatedGroup"]
