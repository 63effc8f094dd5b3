"""The details of a value."""

from __future__ import annotations

from pathlib import Path

from tests.browser.checks.texts import names, number
from tests.browser.reader import Reader
from tests.browser.subject import LAYERS, TP, Truth
from tests.inspect.explorer.test_needs import problems_without
from tests.ir.byte_ranges import byte_ranges
from tpcompile.inspect.explorer.needs import rule_of
from tpcompile.ir.meta import origin_of, parameter_of, value_type
from tpcompile.ir.ops import ALL_REDUCE, op_name, spec_of
from tpcompile.ir.types import Replicate, Shard
from tpcompile.rewriting.rewrite import calls


def readers(reader: Reader, truth: Truth) -> None:
    """Read who reads a value, and what it reads."""
    graph = truth.graph_after("insert-collectives").graph
    for name in ("l1_input_normed", "l0_o_proj_sum", "l2_swiglu"):
        node = next(node for node in graph.nodes if node.name == name)
        reader.go(view="pipeline", c=0, node=name, **{"pass": "insert-collectives"})
        assert names(reader.under("Operands")) == [operand.name for operand in node.all_input_nodes]
        assert f"Readers ({len(node.users)})" in reader.text("#details")
        assert names(reader.under("Readers")) == [user.name for user in node.users]


def line(reader: Reader, truth: Truth) -> None:
    """Read the line of a value in the second of two folded layers."""
    for name in ("l2_q_rotated", "l1_q_rotated"):
        reader.go(view="graph", c=0, node=name, **{"pass": "fuse-qkv"})
        assert reader.texts("#details h2") == [f"%{name}"]
        assert truth.lines.stages["fuse-qkv"][name][1] in reader.texts("#details pre")


def placement(reader: Reader, truth: Truth) -> None:
    """Read how values are placed."""
    for name in ("embedding", "l0_o_proj", "l0_input_normed", "l1_swiglu", "l0_q_k_v_proj"):
        placed = value_type(truth.nodes[name]).placement
        reader.go(view="ranks", c=0, node=name)
        text = reader.text("#details")
        if isinstance(placed, Shard):
            assert f"Shard({placed.dim}, {placed.layout}): each rank holds its part" in text
        elif isinstance(placed, Replicate):
            assert "Replicate: every rank holds the whole value" in text
        else:
            assert f"{placed}: each rank holds a term" in text


def recipe(reader: Reader, truth: Truth) -> None:
    """Read which checkpoint bytes make the fused projection of rank 1."""
    for name in ("l0_q_k_v_proj_weight", "l2_q_k_v_proj_weight"):
        parameter = parameter_of(truth.nodes[name])
        wanted = byte_ranges(parameter.shards[1], parameter.type.dtype.itemsize)
        reader.go(view="pipeline", c=0, node=name)
        table = reader.rows("#details table.reads")[1:]
        starts = [n for n, row in enumerate(table) if row[0]]
        assert [table[n][0] for n in starts] == [f"rank {rank}" for rank in range(TP)]
        rows = table[starts[1] : starts[2]]
        ranges = {tensor: tuple(map(number, bytes.split(" to "))) for _, tensor, bytes, _ in rows}
        assert ranges == {tensor: runs[0] for tensor, runs in wanted.items()}
        assert all(len(runs) == 1 for runs in wanted.values()) and len(ranges) == 3
        assert parameter.describe() in reader.text("#details")


def needs(reader: Reader, truth: Truth) -> None:
    """Read why a sum is there: its reader would break the rule that it does break without it."""
    nodes = calls(truth.graph, ALL_REDUCE)
    for node in (nodes[0], nodes[-2]):
        reader.go(view="pipeline", c=0, node=node.name)
        told = "\n".join(reader.under("Why"))
        count = 0
        for user in node.users:
            for problem in problems_without(truth.graph, node.name, user.name):
                rule_and_types = f"(rule {problem['rule']}): found {problem['got']}; expected"
                assert f"%{user.name} {rule_and_types} {problem['expected']}" in told
                count += 1
        assert count


def rule(reader: Reader, truth: Truth) -> None:
    """Read which rule placed a value, and from which operands."""
    node = truth.nodes["l1_o_proj"]
    named = rule_of(node)
    assert named is not None
    reader.go(view="pipeline", c=0, node=node.name)
    told = "\n".join(reader.under("Why"))
    assert (
        f"The rule {named[0]} of {op_name(node)} ({named[1]}:{named[2]}) infers the type from"
        in told
    )
    for operand in node.all_input_nodes:
        placed = value_type(operand).placement
        assert isinstance(placed, Shard)
        assert f"%{operand.name} Shard({placed.dim}, {placed.layout})" in told


def history(reader: Reader, truth: Truth) -> None:
    """Read which pass put in the seventh sum over ranks, and which op it took the place of."""
    reader.go(view="ranks", c=0)
    table = [row for row in reader.rows('[aria-label="Collectives"]') if row]
    sums = [row for row in table if row[1] == "all_reduce"]
    name = calls(truth.graph, ALL_REDUCE)[6].name
    assert sums[6][2] == f"%{name}" == f"%l{LAYERS - 1}_down_proj_sum"
    reader.click('[aria-label="Collectives"] a', f"%{name}")
    assert reader.texts("#details h2") == [f"%{name}"]
    told = [text.rstrip(".") for text in reader.texts("#details ol.history li")]
    changes, proved = zip(*(text.partition("; ")[::2] for text in told), strict=True)
    assert list(changes) == _history(truth, name)
    assert proved[:2] == ("", "the same expression")
    assert changes[:2] == (
        "shard-linears: inserted",
        "insert-collectives: replaced tpc.redistribute by tpc.all_reduce",
    )


def _history(truth: Truth, name: str) -> list[str]:
    """Say which passes made a value that took the place of no other captured value."""
    graphs, changes = truth.seen.graphs, list[str]()
    node = next(key for key, entry in graphs[-1].items() if entry.name == name)
    for stage in range(len(graphs) - 1, 0, -1):
        entry, pass_name = graphs[stage][node], truth.seen.names[stage]
        if node in graphs[stage - 1]:
            if graphs[stage - 1][node].line != entry.line:
                changes.append(f"{pass_name}: changed its operands or its type")
            continue
        gone = [key for key in graphs[stage - 1] if key not in graphs[stage]]
        same = [key for key in gone if graphs[stage - 1][key].meanings & entry.meanings]
        if not same:
            return [f"{pass_name}: inserted", *reversed(changes)]
        node = same[0]
        ops = (graphs[stage - 1][node].line, entry.line)
        old, new = (line.partition(" = ")[2].partition("(")[0] for line in ops)
        changes.append(f"{pass_name}: replaced {old} by {new}")
    return ["capture: captured from the model", *reversed(changes)]


def expression(reader: Reader, truth: Truth) -> None:
    """Read the expression of a value, and of the values that it reads."""
    reader.go(view="graph", c=0, node="l1_swiglu", **{"pass": "raise-swiglu"})
    equation, *_ = reader.texts("#details pre.expression")
    assert equation == "%l1_swiglu = %l1_up_proj[i, j] · silu(%l1_gate_proj[i, j])"
    folded = reader.texts("#details .definition > summary")
    assert sorted(folded) == ["%l1_gate_proj", "%l1_up_proj"]
    reader.click("#details .definition > summary", "%l1_gate_proj")
    reader.page.wait_for_selector("#details .definition[open] > pre", timeout=3000)
    assert reader.texts("#details .definition[open] > pre") == [
        "%l1_gate_proj = linear(%l1_post_attention_normed[i, k], "
        "model.layers.1.mlp.gate_proj.weight[j, k])"
    ]
    reader.go(view="graph", c=0, node="l2_q_k_v_proj_weight", **{"pass": "fuse-qkv"})
    whole = reader.page.text_content("#details pre.expression")
    parts = [f"model.layers.2.self_attn.{part}_proj.weight[i, j]" for part in "qkv"]
    assert whole == f"cat({', '.join(parts)}; i in 96, 32, 32)"


def proof(reader: Reader, truth: Truth) -> None:
    """Read what passes did to an expression."""
    reader.go(view="pipeline", c=0, node="l2_attention", **{"pass": "cache-kv"})
    told = reader.texts("#details ol.history li")
    assert "equal by the rewrite without-past: attention to a cache is" in told[-1]
    assert told[0] == "capture: captured from the model."
    unchanged = [text for text in reader.under("Why") if text.endswith("which is proved.")]
    stages = truth.seen.names.index("cache-kv")
    count = stages - len(told) + 1
    assert unchanged == [f"{count} other passes left its expression as it is, which is proved."]
    reader.go(view="pipeline", c=0, node=f"l{LAYERS - 1}_o_proj", **{"pass": "select-rows"})
    assert reader.texts("#details ol.history li:last-child pre") == [
        f"%l{LAYERS - 1}_attention[i, k/16, k%16]",
        f"%l{LAYERS - 1}_attention[%logit_rows[i], k/16, k%16]",
    ]


def cost(reader: Reader, truth: Truth) -> None:
    """Read the work of a sharded linear on each rank."""
    node = truth.nodes["l0_q_k_v_proj"]
    spec = spec_of(node)
    assert spec is not None
    kinds = [value_type(operand) for operand in node.all_input_nodes]
    reader.go(view="pipeline", c=0, node=node.name)
    table = reader.page.eval_on_selector_all(
        "#details table",
        "(all) => [...all[all.length - 1].rows].map(row => [...row.cells].map(c => c.innerText))",
    )
    for rank in range(TP):
        work = spec.cost(value_type(node), kinds, rank)
        assert table[rank + 1][:2] == [f"rank {rank}", f"{work.flops:,}"]
    assert len(table) == TP + 1


def source(reader: Reader, truth: Truth) -> None:
    """Read the line of the model that a value comes from."""
    for name in ("l1_swiglu", "l0_q_rotated"):
        origin = origin_of(truth.nodes[name])
        reader.go(view="pipeline", c=0, node=name)
        told = reader.under("Source")
        assert told[0] == str(origin)
        code = Path(origin.file).read_text().splitlines()[origin.line - 1]
        assert reader.text("#details .here").split() == [str(origin.line), *code.split()]
