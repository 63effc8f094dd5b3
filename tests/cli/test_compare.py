"""Tests of `tpcompile compare`: its output, and that it detects mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.cli.conftest import Cli
from tests.compare.program.mistakes import eps
from tests.compare.program.wrong import operands
from tests.models import preset_pair
from tpcompile import options
from tpcompile.ir.ops import ARGMAX, PAGED_ATTENTION, SPECS
from tpcompile.passes import Report, default_pipeline
from tpcompile.rewriting.rewrite import calls, insert
from tpcompile.vm.groups import NormQkvRopeAppend
from tpcompile.vm.lowering import lower
from tpcompile.vm.schedule import scheduled as scheduling

pytestmark = pytest.mark.usefixtures("forked_launchers")

KEYS = ["ok", "proof", "rows", "first_divergence", "tokens_equal", "top5", "choices"]
ROW_KEYS = {"node", "layer", "max_abs", "rel", "ok"}
ENDS = ["emitted", "best tokens", *(f"decode step {step}" for step in (1, 2, 3, 4)), "ranks"]


@pytest.mark.parametrize("options", ["", "--dtype bfloat16", "--lengths 1", "--backend torch"])
def test_models_agree(cli: Cli, options: str) -> None:
    ran = cli(f"compare preset:tiny-qwen2 --tp 4 --random-weights 0 --simulate {options}")
    assert ran.status == 0, ran.out
    assert "values compared" in ran.out
    assert "FIRST DIVERGENCE" not in ran.out
    assert all(f"│ {end}" in ran.out for end in ("captured", *ENDS))


def test_json(cli: Cli) -> None:
    line = "compare preset:tiny-qwen3 --tp 3 --random-weights 1 --json --simulate"
    report = json.loads(cli(line).out)
    assert list(report) == KEYS
    assert all(set(row) >= ROW_KEYS for row in report["rows"])
    assert report["tokens_equal"]
    assert report["first_divergence"] is None
    assert report["rows"][0]["source"] == "Hugging Face eager"
    assert all(row["proved"] and row["reason"] is None for row in report["proof"]["passes"])
    assert [row["name"] for row in report["proof"]["passes"]][:2] == ["canonicalize", "split-heads"]
    assert report["proof"]["program"] is None
    ends = {row["node"]: row for row in report["rows"][-len(ENDS) :]}
    assert list(ends) == ENDS
    assert ends["emitted"]["source"] == "modules of the ranks, in this process"
    assert ends["emitted"]["max_abs"] == 0.0, "emitted modules equal the graph"
    assert ends["best tokens"]["max_abs"] == 0.0
    assert ends["decode step 1"]["rel"] < 1e-5


@pytest.mark.parametrize("options", ["", "--dtype bf16"])
def test_the_error_of_activations(cli: Cli, options: str) -> None:
    line = "compare preset:tiny-qwen3 --tp 2 --random-weights 0 --simulate --json --weights int8:16"
    ran = cli(f"{line} --activations int8 {options}")
    assert ran.status == 0
    report = json.loads(ran.out)
    ends = {row["node"]: row for row in report["rows"][-len(ENDS) - 1 :]}
    row = ends.pop("activations")
    assert list(ends) == ENDS
    assert row["source"] == "int8 activations beside 16 bits, both eager"
    assert 1e-4 < row["error"] < 5e-2
    assert row["ok"] and row["limit"] is None, "it is shown, and judged by nobody"


def test_a_checkpoint_on_ranks_of_their_own(cli: Cli, tmp_path: Path) -> None:
    preset_pair("qwen3-0.6b").eager.save_pretrained(tmp_path)
    ran = cli(f"compare {tmp_path} --tp 3 --all --json")
    assert ran.status == 0
    emitted = next(row for row in json.loads(ran.out)["rows"] if row["node"] == "emitted")
    assert emitted["source"] == "modules of the ranks, one process each"


def test_a_pipeline_without_a_cache_decodes_nothing(cli: Cli) -> None:
    pipeline = (
        "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding,"
        "shard-linears,insert-collectives"
    )
    line = f"compare preset:tiny-qwen3 --tp 2 --random-weights 0 --simulate --all -p {pipeline}"
    ran = cli(line)
    assert (ran.status, "decode step" in ran.out) == (0, False)
    assert "│ emitted" in ran.out


def test_no_more_is_decoded_than_there_is_room_for(cli: Cli) -> None:
    line = "compare preset:tiny-qwen3 --tp 2 --random-weights 0 --simulate --lengths 510"
    ran = cli(line)
    assert ran.status == 0
    assert ("decode step 2" in ran.out, "decode step 3" in ran.out) == (True, False)


PROGRAM = "compare preset:tiny-qwen3 --tp 3 --random-weights 0 --backend reference"


@pytest.mark.parametrize(
    "options", ["", "--lowering rows --workers 7", "--threads 2", "-p decode{spans=3}"]
)
def test_programs_agree(cli: Cli, options: str) -> None:
    ran = cli(f"{PROGRAM} --lengths 9,1 {options}")
    assert ran.status == 0, ran.out
    assert "152 values compared" in ran.out
    assert re.search(r"│ token +│ program step 2\b", ran.out)


def test_programs_with_linear_attention_agree(cli: Cli) -> None:
    line = "compare preset:tiny-qwen3.5 --tp 2 --random-weights 0 --backend native --steps 1 --json"
    ran = cli(line)
    assert ran.status == 0
    nodes = {(row["node"], row["side"]) for row in json.loads(ran.out)["rows"]}
    assert {("v_conv", "program"), ("state", "native"), ("mixed", "native")} <= nodes


def test_native_code_is_compared_with_the_reference_machine(cli: Cli) -> None:
    report = json.loads(cli(f"{PROGRAM.replace('reference', 'native')} --lengths 9,1 --json").out)
    assert report["ok"]
    assert list(report["top5"]) == ["eager", "torch module", "program", "native"]
    nodes = {row["node"] for row in report["rows"] if row["side"] == "native"}
    assert {"embedding", "q_rotated", "partial_lse", "swiglu", "token"} <= nodes
    assert "norm" not in nodes


def test_json_of_a_program(cli: Cli) -> None:
    report = json.loads(cli(f"{PROGRAM} --steps 1 --json").out)
    assert list(report) == KEYS
    sides = {"side", "step", "sequences", "heads", "spans", "rows", "ranks", "by"}
    assert all(set(row) >= ROW_KEYS | sides for row in report["rows"])
    names = [(row["node"], row["layer"], row["side"]) for row in report["rows"]]
    assert len(set(names)) == len(names) == 76
    assert ("q_rotated", 1, "program") in names
    assert report["tokens_equal"] and report["first_divergence"] is None
    assert list(report["top5"]) == ["eager", "torch module", "program"]


def test_the_comparison_of_a_program_can_fail(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with another epsilon is detected: its error is small, but far above fp32 rounding."""
    spoil = operands(NormQkvRopeAppend, normed=eps(1e-5))

    def spoilt(*given: Any) -> Any:
        return spoil((None, lower(*given)))[1]

    monkeypatch.setattr(scheduling, "lower", spoilt)
    refused = cli(PROGRAM)
    assert refused.status != 0
    assert "violates the rule 'values'" in refused.err
    monkeypatch.setattr(scheduling, "check_values", lambda *_: scheduling.NOT_CHECKED)
    ran = cli(f"{PROGRAM} --json")
    first = json.loads(ran.out)["first_divergence"]
    assert (ran.status, first["node"], first["layer"]) == (1, "norm", 1)
    assert first["by"][0].startswith("norm_qkv_rope_append ")
    assert json.loads(cli(f"{PROGRAM} --tolerance 0 --json").out)["ok"] is False
    assert cli(f"{PROGRAM} --tolerance 0.5").status == 0


@dataclass(frozen=True)
class Wrong:
    """Pass with a mistake that leaves a valid graph."""

    mistake: Callable[[fx.GraphModule], None]
    name: ClassVar[str] = "wrong"

    def apply(self, gm: fx.GraphModule) -> Report:
        self.mistake(gm)
        return Report(matches=1)


def other_scale(gm: fx.GraphModule) -> None:
    place = SPECS[PAGED_ATTENTION].argument_names.index("scale")
    calls(gm, PAGED_ATTENTION)[1].update_arg(place, 1.0)


def narrow_window(gm: fx.GraphModule) -> None:
    """Set a window that fits the prompt of nine tokens but not the first new token."""
    place = SPECS[PAGED_ATTENTION].argument_names.index("window")
    calls(gm, PAGED_ATTENTION)[0].update_arg(place, 9)


def slightly_other_scale(gm: fx.GraphModule) -> None:
    """Scale by 1.01: a small error, but far above fp32 rounding."""
    place = SPECS[PAGED_ATTENTION].argument_names.index("scale")
    attention = calls(gm, PAGED_ATTENTION)[1]
    attention.update_arg(place, 1.01 * attention.args[place])  # type: ignore[operator]


def worst_tokens(gm: fx.GraphModule) -> None:
    """Pick the tokens with the smallest logits; leave the logits unchanged."""
    (tokens,) = calls(gm, ARGMAX)
    logits = tokens.args[0]
    with gm.graph.inserting_before(tokens):
        tokens.update_arg(0, insert(logits, torch.ops.aten.neg.default, logits))


MISTAKES = {
    other_scale: "l1_attention",
    narrow_window: "decode step 1",
    worst_tokens: "best tokens",
}


@pytest.mark.parametrize(
    ("mistake", "where"), [*((mistake, "--simulate") for mistake in MISTAKES), (narrow_window, "")]
)
def test_a_mistake_in_a_pass_is_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, mistake: Any, where: str
) -> None:
    monkeypatch.setattr(
        options, "default_pipeline", lambda tp: [*default_pipeline(tp), Wrong(mistake)]
    )
    line = f"compare preset:tiny-qwen3 --tp 2 --random-weights 0 --lengths 9,9,9,9 --json {where}"
    ran = cli(line)
    report = json.loads(ran.out)
    assert (ran.status, report["ok"]) == (1, False)
    assert MISTAKES[mistake] in report["first_divergence"]["node"]


@pytest.mark.parametrize(
    ("tolerance", "status"), [("", 1), ("--tolerance 0", 1), ("--tolerance 0.5", 0)]
)
def test_the_tolerance_decides(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tolerance: str, status: int
) -> None:
    wrong = Wrong(slightly_other_scale)
    monkeypatch.setattr(options, "default_pipeline", lambda tp: [*default_pipeline(tp), wrong])
    ran = cli(f"compare preset:tiny-qwen3 --tp 3 --random-weights 0 --simulate {tolerance}")
    assert ran.status == status
    assert ("FIRST DIVERGENCE" in ran.out) == bool(status)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare preset:tiny-qwen3 --tp 2", "without weights"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights x", "the seed must be"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --lengths 3,0", "each length must"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --against ego", "Did you mean eager"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --tolerance 2", "relative error"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 -p canonicalize", "does not shard"),
        ("compare preset:tiny-qwen3 --tp 7 --random-weights 0", "6 query heads"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --steps 2", "--backend reference"),
        (f"{PROGRAM} --simulate", "--simulate applies to the torch backend only"),
        (f"{PROGRAM} --lengths 9,513 --steps 1", "513 tokens"),
        (f"{PROGRAM} --lengths 9 --steps 99999999", "at most 512, the max_position_embeddings"),
        (f"{PROGRAM} --steps 0", "the number of steps must be an integer of at least 1"),
        (f"{PROGRAM} --lowering row", "Did you mean rows"),
        (f"{PROGRAM} -p standard", "does not produce a program"),
        (f"{PROGRAM} --backend referenz", "Did you mean reference"),
    ],
)
def test_bad_input(cli: Cli, line: str, message: str) -> None:
    ran = cli(line)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


def test_mixtures_of_experts(cli: Cli) -> None:
    """Both results are shown: the choices, and all values with those of eager."""
    line = "compare preset:tiny-qwen3-moe --tp 2 --random-weights 0 --dtype bfloat16"
    ran = cli(f"{line} --simulate")
    assert ran.status == 0, ran.out
    _, measured = ran.out.split("\nmeasured: ")
    assert "changed choices of " in measured.splitlines()[1]
    ran = cli(f"{line} --backend reference --steps 1 --json")
    assert ran.status == 0, ran.out
    report = json.loads(ran.out)
    assert {row["node"] for row in report["rows"]} >= {"router", "choice", "scores"}
    assert report["choices"]["compared"] == 2 * 2 * 3  # sides, layers and sequences
    assert all(choice["ok"] for choice in report["choices"]["changed"])


def test_dense_models_have_no_choices(cli: Cli) -> None:
    line = "compare preset:tiny-qwen3 --tp 1 --random-weights 0 --simulate"
    assert "choices" not in cli(line).out
    assert json.loads(cli(f"{line} --json").out)["choices"] is None
