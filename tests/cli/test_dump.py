"""Tests of `tpcompile dump`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, without_lines
from tpcompile.passes import decode_pipeline, default_pipeline

STAGES = ["capture", *(current.name for current in default_pipeline())]
TINY = "dump preset:tiny-qwen3 --tp 2"
DOT = ("--format", "dot")


def test_the_final_graph(cli: Cli, golden: Callable[[str, str], None]) -> None:
    ran = cli(TINY)
    assert ran.status == 0
    assert ran.err == ""
    golden("cli/dump.txt", without_lines(ran.out))


def test_diffs(cli: Cli, golden: Callable[[str, str], None]) -> None:
    ran = cli(TINY, "--diff")
    headers = [line.split(":")[0] for line in ran.out.splitlines() if line.startswith("# ")]
    assert headers == [f"# {name}" for name in STAGES[1:]]
    golden("cli/dump_diff.txt", without_lines(ran.out))


def test_diffs_add_up(cli: Cli) -> None:
    """The diffs of all stages add up to the difference between the first and the last stage."""
    first = cli(TINY, "--stop-after", "capture").out.splitlines()
    last = cli(TINY).out.splitlines()
    diff = cli(TINY, "--diff").out.splitlines()
    changes = [line for line in diff if not line.startswith(("+++ ", "--- "))]
    added = sum(line.startswith("+") for line in changes)
    removed = sum(line.startswith("-") for line in changes)
    assert len(last) - len(first) == added - removed


def test_print_after_every_pass(cli: Cli) -> None:
    out = cli(TINY, "--print-ir-after", "all").out
    headers = [line for line in out.splitlines() if line.startswith("# after ")]
    assert [line.split()[2].rstrip(":") for line in headers] == STAGES
    assert out.endswith(cli(TINY).out)


@pytest.mark.parametrize("options", ["", "{spans=3,interleaved=true}"])
def test_every_stage_of_a_decode_step(cli: Cli, options: str) -> None:
    """A pipeline given by name has one stage per pass."""
    ran = cli(TINY, "-p", f"decode{options}", "--print-ir-after", "all")
    assert (ran.status, ran.err) == (0, "")
    headers = [line for line in ran.out.splitlines() if line.startswith("# after ")]
    passes = decode_pipeline(2, interleaved=bool(options))
    stages = ["capture", *(current.name for current in passes)]
    assert [line.split()[2].rstrip(":") for line in headers] == stages
    assert ("interleaved=True" in ran.out) == ("spans=3" in ran.out) == bool(options)
    assert cli(TINY, "-p", "standard").out == cli(TINY).out


def test_print_after_one_pass_is_where_stop_after_stops(cli: Cli) -> None:
    printed = cli(TINY, "--print-ir-after", "kv-heads").out
    header, _, graph = printed.partition("\n")
    assert header.startswith("# after kv-heads: 4 matches, ")
    assert graph == cli(TINY, "--stop-after", "kv-heads").out


def test_diff_of_one_pass(cli: Cli) -> None:
    out = cli(TINY, "--diff", "--print-ir-after", "fuse-qkv").out
    assert out.splitlines()[1:3] == ["--- after insert-collectives", "+++ after fuse-qkv"]
    assert out.count("\n+++ ") == 1


def test_one_rank(cli: Cli) -> None:
    out = cli("dump preset:tiny-qwen3 --tp 4 --rank 1").out
    assert out.startswith("graph tiny-qwen3 (rank 1 of 4)\n")
    assert "param(model.embed_tokens.weight[254:507]) : f32[253, 64]" in out


def test_stages_before_the_plan_are_those_of_one_rank(cli: Cli) -> None:
    out = cli("dump preset:tiny-qwen3 --tp 4 --rank 3 --stop-after raise-norm").out
    assert out.startswith("graph tiny-qwen3 (tp=1)\n")


def test_json(cli: Cli) -> None:
    dumped = json.loads(cli(TINY, "--json").out)
    assert dumped == json.loads(cli(TINY, "--format", "json").out)
    assert set(dumped) == {"name", "tp", "ranks", "nodes", "parameters"}
    assert (dumped["name"], dumped["tp"], dumped["ranks"]) == ("tiny-qwen3", 2, [0, 1])
    for node in dumped["nodes"]:
        assert set(node) == {"name", "op", "operands", "type", "origin"}
        assert set(node["origin"]) == {"module", "file", "line", "layer"}


def test_json_of_every_stage(cli: Cli) -> None:
    stages = json.loads(cli(TINY, "--json", "--print-ir-after", "all").out)["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    assert stages[-1]["graph"] == json.loads(cli(TINY, "--json").out)


def test_dot(cli: Cli) -> None:
    out = cli(TINY, "--format", "dot").out
    assert out.startswith('digraph "tiny-qwen3" {\n')
    assert out.endswith("}\n")


@pytest.mark.parametrize(("form", "suffix"), [("text", "txt"), ("json", "json"), ("dot", "dot")])
def test_dump_dir(cli: Cli, tmp_path: Path, form: str, suffix: str) -> None:
    directory = tmp_path / "new" / "stages"
    ran = cli(TINY, "--format", form, "--dump-dir", str(directory))
    names = [f"{number:02d}-{name}.{suffix}" for number, name in enumerate(STAGES)]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert (directory / names[-1]).read_text(encoding="utf-8") == ran.out
    assert ran.err == f"wrote {len(STAGES)} files to {directory}\n"
    assert list(directory.parent.iterdir()) == [directory]


def test_dump_dir_replaces_an_earlier_dump(cli: Cli, tmp_path: Path) -> None:
    cli(TINY, "--dump-dir", str(tmp_path))
    assert cli(TINY, "--dump-dir", str(tmp_path), "--stop-after", "canonicalize").status == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00-capture.txt", "01-canonicalize.txt"]


def test_a_directory_with_a_config_only(cli: Cli, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from tpcompile.presets import preset

    AutoConfig.for_model(**preset("tiny-qwen3")).save_pretrained(tmp_path / "tiny-qwen3")
    assert cli(f"dump {tmp_path}/tiny-qwen3 --tp 2").out == cli(TINY).out


def test_dtype_and_timing(cli: Cli) -> None:
    ran = cli(TINY, "--dtype", "bfloat16", "--timing", "--stop-after", "raise-norm")
    assert "bf16[1013, 64]" in ran.out
    assert "raise-norm" not in ran.out
    for word in ("raise-norm", "matches", "change", "ms", "captured in"):
        assert word in ran.err
    assert max(map(len, ran.err.splitlines())) <= 80


def test_a_pipeline_that_shards_nothing_warns(cli: Cli) -> None:
    ran = cli(TINY, "-p", "canonicalize")
    assert ran.status == 0
    assert ran.err.startswith("warning: without plan-sharding")


def test_an_invalid_graph_is_status_1(cli: Cli, tmp_path: Path, broken_pipeline: str) -> None:
    ran = cli(TINY, "-p", broken_pipeline, "--dump-dir", str(tmp_path / "d"))
    assert ran.status == 1
    assert ran.out == ""
    assert "The pass drop-collective left an invalid graph" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_kernel(cli: Cli) -> None:
    ran = cli("dump preset:tiny-qwen3 --tp 1 --kernel h200")
    assert ran.out == cli("schedule preset:tiny-qwen3 --target h200 --kernel").out
    assert "def megakernel(" in ran.out


def test_the_kernel_of_a_model_that_is_quantized(cli: Cli) -> None:
    options = "--weights int4:32 --head keep --kv int8"
    ran = cli(f"dump preset:tiny-qwen3 --tp 1 --kernel h200 {options}")
    assert ran.out == cli(f"schedule preset:tiny-qwen3 --target h200 --kernel {options}").out
    assert ran.out != cli("dump preset:tiny-qwen3 --tp 1 --kernel h200").out


@pytest.mark.parametrize("option", ["--layer 0", "--rank 0", "--diff", "--stop-after capture"])
def test_options_of_graphs_are_refused_beside_a_kernel(cli: Cli, option: str) -> None:
    ran = cli(f"dump preset:tiny-qwen3 --tp 1 --kernel h200 {option}")
    assert ran.status == 2
    assert f"{option.split()[0]} applies to graphs, and --kernel shows a kernel" in ran.err


def test_the_kernel_for_a_target_that_is_not_known(cli: Cli) -> None:
    ran = cli("dump preset:tiny-qwen3 --tp 1 --kernel h20")
    assert ran.status == 2
    assert "There is no target 'h20'. Did you mean h200" in ran.err


def test_one_layer(cli: Cli) -> None:
    """The layer has the values of the whole graph, in the same order."""
    out = cli(TINY, "--layer", "1", "--no-origin").out
    head, section, *lines = out.splitlines()
    assert (head, section) == ("graph tiny-qwen3 (layer 1, tp=2)", "layer 1")
    assert all(line.startswith("  %l1_") and "  #" not in line for line in lines)
    whole = cli(TINY, "--no-origin").out
    names = [line.split()[0] for line in whole.splitlines() if line.startswith("  %l1_")]
    assert [line.split()[0] for line in lines] == names
    ranked = cli(TINY, "--layer", "1", "--rank", "1").out
    assert ranked.startswith("graph tiny-qwen3 (rank 1 of 2, layer 1)\nlayer 1\n")


def test_one_layer_as_json(cli: Cli) -> None:
    nodes = json.loads(cli(TINY, "--layer", "1", "--json").out)["nodes"]
    assert {node["origin"]["layer"] for node in nodes} == {1}


def test_a_layer_that_is_not_there_is_refused(cli: Cli) -> None:
    ran = cli(TINY, "--layer", "2")
    assert (ran.status, ran.out) == (2, "")
    assert "The model has no layer 2. Expected a layer from 0 to 1." in ran.err
    assert "--layer requires --format text or json" in cli(TINY, "--layer", "0", *DOT).err


def test_print_before_a_pass_is_the_stage_that_it_gets(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "before.txt"
    ran = cli(TINY, "--print-ir-before", "kv-heads", "-o", str(file))
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert file.read_text(encoding="utf-8") == cli(TINY, "--stop-after", "shard-linears").out
    refused = cli(TINY, "--print-ir-before", "capture")
    assert (refused.status, "must name a pass of the pipeline" in refused.err) == (2, True)


def test_an_output_that_cannot_be_written_is_refused_first(cli: Cli, tmp_path: Path) -> None:
    ran = cli(TINY, "-o", str(tmp_path))
    assert (ran.status, f"{tmp_path} is a directory" in ran.err) == (2, True)
