"""Dependencies are the least that keeps every conflicting pair in order."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
from hypothesis import given

from tests.vm.programs import Touch, programs
from tests.vm.test_verify import MANY
from tpcompile.vm.dependencies import dependencies, graph_of
from tpcompile.vm.program import Program, conflict
from tpcompile.vm.region import Buffer, Region


@MANY
@given(programs())
def test_every_conflicting_pair_is_ordered_and_no_other_edge_is_there(program: Program) -> None:
    graph = graph_of(dependencies(program.buffers, program.instructions))
    reached = nx.transitive_closure_dag(graph)
    for early, late in combinations(range(len(program.instructions)), 2):
        if conflict(program, early, late) is not None:
            assert reached.has_edge(early, late)
    for early, late in graph.edges:
        assert early < late and conflict(program, early, late) is not None


def test_all_who_read_one_value_share_a_group() -> None:
    tiles = [Region(0, ((4 * n, 4 * n + 4),)) for n in range(8)]
    whole = Region(0, ((0, 32),))
    layer = [Touch(writes=(tile,)) for tile in tiles] + [Touch(reads=(whole,)) for _ in tiles]
    groups = dependencies((Buffer("x", (32,)),), layer * 3)
    writers = tuple(range(16, 24))
    assert all(groups[n] == (writers,) for n in range(24, 32))
    assert len({id(groups[n][0]) for n in range(24, 32)}) == 1
    readers = tuple(range(8, 16))
    assert all(groups[16 + n] == (readers,) for n in range(8)), "and nothing older"
