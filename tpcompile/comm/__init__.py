"""Communication between ranks: in one process, over torch.distributed, sockets, shared memory."""

from tpcompile.comm.group import Group, SimulatedGroup
from tpcompile.comm.neighbours import Neighbours, PeerError
from tpcompile.comm.process_group import ProcessGroupRank
from tpcompile.comm.shared import LIBRARY, Peer, SharedExchange, exchange_bytes

__all__ = [
    "LIBRARY",
    "Group",
    "Neighbours",
    "Peer",
    "PeerError",
    "ProcessGroupRank",
    "SharedExchange",
    "SimulatedGroup",
    "exchange_bytes",
]
