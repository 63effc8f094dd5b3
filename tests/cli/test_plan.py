"""Tests of `tpcompile plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Cli
from tests.models import scaled_config

RANK_KEYS = {
    "rank",
    "q_heads",
    "kv_heads",
    "ffn",
    "vocab",
    "weight_bytes",
    "kv_bytes_per_token",
    "state_bytes_per_sequence",
    "experts",
    "expert_ffn",
    "expert_bytes",
}


def test_table(cli: Cli, golden: Callable[[str, str], None]) -> None:
    ran = cli("plan preset:tiny-qwen3 --tp 4")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    golden("cli/plan.txt", ran.out)


def test_json_keys(cli: Cli) -> None:
    plan = json.loads(cli("plan preset:tiny-qwen3 --tp 4 --json").out)
    assert set(plan) == {"model", "tp", "ranks", "collectives", "formats", "expert_plans"}
    assert plan["formats"] == {"f32": sum(rank["weight_bytes"] for rank in plan["ranks"])}
    assert (plan["model"], plan["tp"]) == ("tiny-qwen3", 4)
    for rank in plan["ranks"]:
        assert set(rank) == RANK_KEYS
    for collective in plan["collectives"]:
        assert set(collective) == {"op", "node", "bytes_per_token"}


def test_numbers(cli: Cli) -> None:
    """6 query heads on 4 ranks are 2 2 1 1; rank 1 has heads 2 and 3, which read both KV heads."""
    plan = json.loads(cli("plan preset:tiny-qwen3 --tp 4 --json").out)
    ranks = plan["ranks"]
    assert [rank["q_heads"] for rank in ranks] == [2, 2, 1, 1]
    assert [rank["kv_heads"] for rank in ranks] == [1, 2, 1, 1]
    assert [rank["kv_bytes_per_token"] for rank in ranks] == [256, 512, 256, 256]
    assert sum(rank["vocab"] for rank in ranks) == 1013
    assert sum(rank["ffn"] for rank in ranks) == 176
    ops = [collective["op"] for collective in plan["collectives"]]
    assert ops == ["all_reduce"] * 5 + ["all_gather", "argmax"]


def test_states_of_linear_attention(cli: Cli) -> None:
    """Three layers have matrices of 16 by 16 in fp32 per head, and three inputs per channel."""
    ranks = json.loads(cli("plan preset:tiny-qwen3.5 --tp 3 --json").out)["ranks"]
    # 2 value heads; a key head, of which q and k, and v
    state_bytes = 3 * 4 * (2 * 16 * 16 + 3 * 4 * 16)
    assert [rank["state_bytes_per_sequence"] for rank in ranks] == [state_bytes] * 3
    heads, *rows = cli("plan preset:tiny-qwen3.5 --tp 3").out.splitlines()[2:7]
    assert heads.split("┃")[-2].strip() == "state"
    assert [row.split("│")[-2].strip() for row in rows[1:4]] == ["8.4 KB"] * 3
    dense = json.loads(cli("plan preset:tiny-qwen3 --json").out)["ranks"]
    assert [rank["state_bytes_per_sequence"] for rank in dense] == [0]


def test_a_cache_in_int8(cli: Cli) -> None:
    """Rows of 16 values in fp32 become 16 bytes and a scale."""
    ranks = json.loads(cli("plan preset:tiny-qwen3 --tp 4 --kv int8 --json").out)["ranks"]
    assert [rank["kv_bytes_per_token"] for rank in ranks] == [80, 160, 80, 80]
    refused = cli("plan preset:tiny-qwen3 --kv int4")
    assert refused.status == 2 and "--kv" in refused.err


def test_plans_of_experts(cli: Cli, golden: Callable[[str, str], None]) -> None:
    """Of 8 experts with 48 features, a token chooses 3. A rank of 3 has 16 features of each."""
    line = "plan preset:tiny-qwen3.5-moe --tp 3"
    golden("cli/plan_experts.txt", cli(line).out)
    assert max(map(len, cli(line).out.splitlines())) <= 80
    plan = json.loads(cli(f"{line} --json").out)
    assert [(rank["experts"], rank["expert_ffn"]) for rank in plan["ranks"]] == [(8, 16)] * 3
    expert_bytes = 4 * 3 * 64 * 48 * 4  # bytes of an expert of each layer
    first, second = plan["expert_plans"]
    assert first == {
        "plan": "tp",
        "bytes_per_token": expert_bytes,
        "chosen": True,
        "reason": "fewest bytes",
    }
    assert (second["plan"], second["chosen"]) == ("ep", False)
    whole = json.loads(cli(f"{line} --experts ep --json").out)
    assert [(rank["experts"], rank["expert_ffn"]) for rank in whole["ranks"]] == [
        (3, 48),
        (3, 48),
        (2, 48),
    ]
    assert [entry["reason"] for entry in whole["expert_plans"]] == ["fewest bytes", "requested"]
    split, held = (
        sum(rank["weight_bytes"] for rank in report["ranks"]) for report in (plan, whole)
    )
    assert split == held
    experts = expert_bytes * 8
    assert experts < split
    few = json.loads(cli("plan preset:tiny-qwen3.5-moe --tp 3 --experts ep --json").out)["ranks"]
    assert few[0]["weight_bytes"] - few[2]["weight_bytes"] > expert_bytes / 2


def test_plans_that_are_not_possible(cli: Cli) -> None:
    refused = cli("plan preset:tiny-qwen3 --tp 2 --experts ep")
    assert refused.status == 2
    message = "--experts ep requires a mixture of experts, but Qwen3ForCausalLM has none"
    assert message in refused.err
    refused = cli("plan preset:tiny-qwen3-moe --tp 2 --experts dp")
    assert refused.status == 2 and "--experts" in refused.err
    refused = cli("plan preset:tiny-qwen3-moe --experts ep -p canonicalize")
    assert refused.status == 2 and "Add plan-sharding to it" in refused.err


def test_one_rank_holds_the_model(cli: Cli) -> None:
    plan = json.loads(cli("plan preset:tiny-qwen3 --tp 1 --json").out)
    assert plan["collectives"] == []
    layer = 64 * 16 * (6 + 2 + 2) + 6 * 16 * 64 + 3 * 64 * 176 + 2 * 16 + 2 * 64
    assert plan["ranks"][0]["weight_bytes"] == 4 * (1013 * 64 + 2 * layer + 64)


def test_half_the_bytes_in_half_the_dtype(cli: Cli) -> None:
    full, half = (
        json.loads(cli(f"plan preset:tiny-qwen2 --tp 2 --json --dtype {dtype}").out)
        for dtype in ("float32", "bfloat16")
    )
    for whole, part in zip(full["ranks"], half["ranks"], strict=True):
        assert whole["weight_bytes"] == 2 * part["weight_bytes"]


def test_a_pipeline_without_a_plan(cli: Cli) -> None:
    ran = cli("plan preset:tiny-qwen3 --tp 2 -p canonicalize,raise-norm")
    assert (ran.status, ran.out) == (2, "")
    assert "Add plan-sharding to the pipeline" in ran.err


def test_an_invalid_graph_is_status_1(cli: Cli, broken_pipeline: str) -> None:
    ran = cli("plan preset:tiny-qwen3 --tp 2 -p", broken_pipeline)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: The pass drop-collective")


UNNEEDED = """
import sys
from tpcompile.cli import main
assert main(["plan", "preset:tiny-qwen3", "--tp", "2"]) == 0
rooms = ("api", "backends", "comm", "compare.comparison", "runtime.model", "serving", "vm.schedule")
found = {f"tpcompile.{room}" for room in rooms}.intersection(sys.modules)
assert not found, found
"""


def test_it_imports_no_room_that_runs_models() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNNEEDED], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_quantized_weights(cli: Cli) -> None:
    """Bytes are those of all components; the embedding and the norms stay."""
    line = "plan preset:tiny-qwen3 --tp 2 --weights int4:16"
    plan = json.loads(cli(f"{line} --json").out)
    assert sum(plan["formats"].values()) == sum(rank["weight_bytes"] for rank in plan["ranks"])
    head, plain = plan["formats"]["int8:16:f32"], plan["formats"]["f32"]
    rows, columns = 1013, 64
    assert head == rows * columns * (1 + 4 / 16)
    assert rows * columns * 4 < plain < rows * columns * 4 * 1.1
    assert "int4:16:f32" in cli(line).out
    formats = json.loads(cli(f"{line} --head keep --json").out)["formats"]
    assert formats == {"int4:16:f32": plan["formats"]["int4:16:f32"], "f32": plain}
    rounding = json.loads(cli(f"{line} --activations int8 --json").out)["formats"]
    assert rounding == {
        name + ":a8" * (":" in name): size for name, size in plan["formats"].items()
    }


def test_weights_that_are_not_read(cli: Cli, tmp_path: Path) -> None:
    """The plan needs no weights: it is that of the same model without quantization."""
    plans = []
    for scheme in ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None):
        config = scaled_config("qwen3-0.6b", dtype="bfloat16")
        if scheme is not None:
            config.quantization_config = scheme
        config.save_pretrained(tmp_path / "model")
        ran = cli(f"plan {tmp_path / 'model'} --tp 2 --json")
        assert ran.status == 0
        assert ("quantized with bitsandbytes" in ran.err) is (scheme is not None)
        assert ("--weights int4" in ran.err) is (scheme is not None)
        plans.append(json.loads(ran.out))
    assert plans[0] == plans[1]
    assert plans[0]["model"] == "model"
    assert set(plans[0]["formats"]) == {"bf16"}
