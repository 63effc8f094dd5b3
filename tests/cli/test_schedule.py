"""Tests of `tpcompile schedule`: its output and files, detected faults, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Cli
from tests.inspect.test_step_trace import check_both
from tests.inspect.trace_format import read_trace
from tpcompile.backends.triton.ahead import Compiled, compile_ahead
from tpcompile.vm.program import Program
from tpcompile.vm.program.text import parse_program
from tpcompile.vm.schedule import scheduled as scheduling
from tpcompile.vm.schedule.assemble import Assembled, assemble
from tpcompile.vm.schedule.policies import POLICIES
from tpcompile.vm.targets import TARGETS

KEYS = [
    "model",
    "tp",
    "target",
    "workers",
    "policy",
    "lowering",
    "spans",
    "batch",
    "context",
    "max_seq_len",
    "instructions",
    "counters",
    "makespan_us",
    "critical_path_us",
    "bandwidth",
    "idle",
    "idle_us",
    "critical_path",
    "verified",
    "computes_graph",
    "without_meaning",
    "errors",
    "kinds",
    "seconds",
]
CPU = "schedule preset:tiny-qwen3 --target cpu --workers 3"


def as_json(cli: Cli, line: str, *more: str) -> dict[str, Any]:
    ran = cli(line, *more, "--json")
    assert (ran.status, ran.err) == (0, "")
    report: dict[str, Any] = json.loads(ran.out)
    return report


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_json(cli: Cli, policy: str, tp: int) -> None:
    report = as_json(cli, f"{CPU} --policy {policy} --tp {tp}")
    assert list(report) == KEYS
    assert (report["target"], report["workers"], report["policy"]) == ("cpu", 3, policy)
    assert (report["verified"], report["computes_graph"], report["errors"]) == (True, True, [])
    assert report["makespan_us"] >= report["critical_path_us"] > 0
    assert sum(kind["count"] for kind in report["kinds"]) == report["instructions"]
    work = sum(kind["us"] for kind in report["kinds"])
    assert report["makespan_us"] * 3 * tp * (1 - report["idle"]) == pytest.approx(work, rel=1e-3)
    assert len(report["idle_us"]) == 3 * tp
    assert 1 < len(report["critical_path"]["labels"]) <= min(50, report["critical_path"]["count"])
    assert ("all_reduce" in [kind["kind"] for kind in report["kinds"]]) == (tp > 1)


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("lowering", ["heads", "rows"])
@pytest.mark.parametrize("rotary", ["half", "interleaved"])
def test_lowerings_and_rotary_layouts(cli: Cli, model: str, lowering: str, rotary: str) -> None:
    report = as_json(
        cli,
        f"schedule preset:{model} --target cpu --workers 24 --tp 2 --batch 2 --spans 2",
        "--lowering",
        lowering,
        "--rotary",
        rotary,
    )
    assert report["verified"]
    assert (report["lowering"], report["batch"], report["spans"]) == (lowering, 2, 2)
    kinds = [kind["kind"] for kind in report["kinds"]]
    assert ("norm_qkv_rows" in kinds) == (lowering == "rows")
    assert ("norm_qkv_rope_append" in kinds) == (lowering == "heads")


def test_table(cli: Cli) -> None:
    ran = cli(f"{CPU} --tp 2 --policy zigzag")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ran.out.splitlines()]
    figures = {row[0]: row[1] for row in rows if len(row) == 2}
    report = as_json(cli, f"{CPU} --tp 2 --policy zigzag")
    assert figures["policy"] == "zigzag"
    assert figures["lowering"] == f"{report['lowering']}, chosen by auto"
    assert figures["verified"] == "yes"
    assert figures["computes the graph"] == "yes, proved"
    assert figures["makespan"] == f"{report['makespan_us']:,.1f} µs"
    assert figures["critical path"] == f"{report['critical_path_us']:,.1f} µs"
    kinds = {row[0]: row[1] for row in rows if len(row) == 5}
    assert kinds == {kind["kind"]: str(kind["count"]) for kind in report["kinds"]}


def test_targets_differ_in_workers_and_speed(cli: Cli) -> None:
    reports = {
        name: as_json(cli, f"schedule preset:tiny-qwen3 --target {name}")
        for name in ("a100", "h200")
    }
    assert {name: report["workers"] for name, report in reports.items()} == {
        "a100": 108,
        "h200": 132,
    }
    tokens = TARGETS["a100"].span_tokens
    assert reports["a100"]["spans"] == reports["a100"]["max_seq_len"] // tokens
    assert reports["a100"]["makespan_us"] > reports["h200"]["makespan_us"]


def test_a_target_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"workers": 5, "instruction_us": 7.0, "spans": 3}))
    report = as_json(cli, "schedule preset:tiny-qwen3 --target", str(path))
    assert (report["workers"], report["spans"]) == (5, 3)
    assert report["kinds"][0]["us"] / report["kinds"][0]["count"] > 7.0


def test_text(cli: Cli) -> None:
    ran = cli(f"{CPU} --tp 2 --text")
    assert (ran.status, ran.err) == (0, "")
    program = parse_program(ran.out)
    report = as_json(cli, f"{CPU} --tp 2")
    assert len(program.instructions) == report["instructions"]
    assert (program.counters, program.ranks, program.repeats) == (report["counters"], 2, True)


def test_trace_and_picture(cli: Cli, tmp_path: Path) -> None:
    trace, picture = tmp_path / "a.json", tmp_path / "a.svg"
    files = ("--trace", str(trace), "--svg", str(picture))
    ran = cli(f"{CPU} --tp 2 --json", *files)
    assert (ran.status, ran.err) == (0, f"wrote {trace}\nwrote {picture}\n")
    report = json.loads(ran.out)
    events = read_trace(trace.read_text(encoding="utf-8"))
    slices = [event for event in events if event.get("cat") == "instruction"]
    assert len(slices) == report["instructions"]
    assert {(e["pid"], e["tid"]) for e in slices} == {(1 + t // 3 * 3, 1 + t) for t in range(6)}
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(report["makespan_us"], abs=0.01)
    words = {text.text for text in ElementTree.parse(picture).iter() if text.text}
    title = "preset:tiny-qwen3, tp=2, batch 1, 1,024 tokens, on cpu: dynamic"
    assert {title, "rank 0", "rank 1", "worker 2", "all_reduce"} <= words
    before = picture.read_bytes()
    assert cli(CPU + " --tp 2", *files).status == 0
    assert picture.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg"]


def test_the_layers_of_a_picture(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    ran = cli(f"{CPU} --svg-layers 1:2 --svg", str(picture))
    assert (ran.status, ran.err) == (0, f"wrote {picture}\n")
    words = {text.text for text in ElementTree.parse(picture).iter() if text.text}
    assert "Shown below: layer 1 of 2" in words
    assert any(text.startswith("where the time goes: ") for text in words)


@pytest.mark.parametrize(
    ("workers", "tp", "chosen"), [(3, 1, "heads"), (24, 1, "rows"), (5, 4, "heads and rows")]
)
def test_the_lowering_that_was_chosen(cli: Cli, workers: int, tp: int, chosen: str) -> None:
    """Rows if a rank has fewer heads than workers; ranks may differ."""
    line = f"schedule preset:tiny-qwen3 --target cpu --workers {workers} --tp {tp}"
    report = as_json(cli, line)
    assert report["lowering"] == chosen
    assert as_json(cli, f"{line} --lowering rows")["lowering"] == "rows"


@pytest.mark.parametrize("tp", [1, 2])
def test_measured_steps(cli: Cli, tmp_path: Path, tp: int) -> None:
    trace = tmp_path / "a.json"
    line = f"schedule preset:tiny-qwen3 --target cpu --threads 1 --context 40 --tp {tp} --measured"
    ran = cli(f"{line} --json --trace", str(trace))
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    assert list(report) == [*KEYS, "measured"]
    measured = report["measured"]
    assert measured["predicted_us"] == report["makespan_us"]
    assert measured["measured_us"] > 0
    counts = [(kind["kind"], kind["count"]) for kind in measured["kinds"]]
    assert counts == [(kind["kind"], kind["count"]) for kind in report["kinds"]]
    check_both(read_trace(trace.read_text(encoding="utf-8")), report["instructions"], tp)


def test_measured_steps_of_few_bits(cli: Cli) -> None:
    """The program whose steps are measured has the formats that the schedule shows."""
    line = "schedule preset:tiny-qwen3 --target cpu --threads 1 --context 40 --tp 2 --measured"
    ran = cli(f"{line} --weights int4:32 --json")
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    counts = [(kind["kind"], kind["count"]) for kind in report["measured"]["kinds"]]
    assert counts == [(kind["kind"], kind["count"]) for kind in report["kinds"]]
    assert report["measured"]["measured_us"] > 0


def test_measured_tables(cli: Cli) -> None:
    ran = cli("schedule preset:tiny-qwen3 --target cpu --workers 1 --context 40 --measured")
    assert ran.status == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "predicted and measured" in ran.out


def test_a_kernel_compiled_ahead(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resources of the kernel are in the JSON, and in a table of their own.

    It is compiled once.
    """
    compiled = functools.cache(lambda arch: compile_ahead(programs[-1], arch))
    programs: list[Program] = []

    def once(program: Program, arch: str) -> Compiled:
        programs.append(program)
        return compiled(arch)

    monkeypatch.setattr("tpcompile.scheduling.compile_ahead", once)
    line = "schedule preset:tiny-qwen3 --target h200 --workers 8 --aot sm_90"
    report = json.loads(cli(f"{line} --json").out)["aot"]
    assert list(report) == [
        *("arch", "registers", "spills", "shared_bytes", "code_bytes", "seconds")
    ]
    assert report["spills"] == 0 < report["registers"] <= 255
    assert "registers per thread" in cli(line).out
    assert programs[0] == programs[1]


@pytest.mark.parametrize("form", ["--text", "--kernel"])
def test_a_form_without_a_place_for_resources(cli: Cli, form: str) -> None:
    ran = cli(f"schedule preset:tiny-qwen3 --target h200 --aot sm_90 {form}")
    assert ran.status == 2 and "--aot prints tables or JSON" in ran.err


@pytest.mark.parametrize("weights", ["", "--weights int8"])
def test_the_kernel_is_python(cli: Cli, weights: str) -> None:
    ran = cli(f"schedule preset:tiny-qwen3 --target h200 --kernel {weights}")
    compile(ran.out, "kernel.py", "exec")
    assert "def megakernel(" in ran.out


@pytest.mark.parametrize("form", ["--kernel", "--aot sm_90"])
def test_weights_that_have_no_kernel(cli: Cli, form: str) -> None:
    line = "schedule preset:tiny-qwen3 --target h200 --weights int8 --activations int8"
    ran = cli(f"{line} {form}")
    assert ran.status == 2 and "cannot read weights in int8:64:f32:a8. At l0_q_k_v" in ran.err


def test_more_workers_than_cores(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the cores. If there are too few of them, a warning says so."""
    monkeypatch.setattr("tpcompile.cores.cores", lambda: 2)
    line = "schedule preset:tiny-qwen3 --target cpu --context 40 --measured --json --tp"
    two, three = cli(f"{line} 2"), cli(f"{line} 3")
    assert [json.loads(ran.out)["workers"] for ran in (two, three)] == [1, 1]
    assert (two.err, three.err) == ("", "warning: 3 workers share 2 cores\n")


@pytest.fixture
def lost_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the waits of the last instruction in each program."""

    def broken(*args: Any, **options: Any) -> Assembled:
        assembled = assemble(*args, **options)
        waits = (*assembled.program.waits[:-1], ())
        return dataclasses.replace(
            assembled, program=dataclasses.replace(assembled.program, waits=waits)
        )

    monkeypatch.setattr(scheduling, "assemble", broken)


@pytest.mark.usefixtures("lost_waits")
def test_a_program_that_is_not_proved(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"{CPU} --json --svg", str(tmp_path / "a.svg"))
    report = json.loads(ran.out)
    assert (ran.status, report["verified"], report["makespan_us"]) == (1, False, None)
    assert any("argmax" in error["got"] for error in report["errors"])
    assert ran.err == f"warning: {tmp_path}/a.svg is not written: the program is not valid\n"
    assert list(tmp_path.iterdir()) == []
    table = cli(CPU)
    assert (table.status, table.err) == (1, "")
    assert "│ NO: " in table.out and report["errors"][0]["rule"] in table.out


@pytest.mark.usefixtures("lost_waits")
def test_check_sees_it_too(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2 --json")
    report = json.loads(ran.out)
    assert (ran.status, report["ok"]) == (1, False)
    assert not any(schedule["ok"] for schedule in report["schedules"])
    assert {error["pass"] for error in report["errors"]} == {"schedule"}
    table = cli("check preset:tiny-qwen3 --tp 2")
    assert table.status == 1
    headers = re.findall(r"^(policy .*?)(?:, and (\d+) more)?: [\d,]+ faults?$", table.out, re.M)
    assert {name for name, _ in headers} <= {error["source"] for error in report["errors"]}
    assert sum(1 + int(more or 0) for _, more in headers) == len(report["schedules"])


REFUSED = {
    "--target h20": "Did you mean",
    "--target h200 --workers 0": "the number of workers must be an integer of at least 1, got '0'",
    "--target zero.json": "workers=0",
    "--target none.json": "There is no file none.json.",
    "--target . --policy zigzag": "b200. Or give a JSON file with the fields of a target.",
    "--target cpu --workers 65537": "--workers 65,537. Expected at most 65,536",
    "--target cpu --batch 1025": "--batch 1,025 is too large. Expected at most 1,024",
    "--target cpu --context 2147483648": "Expected at most 2,147,483,647",
    "--target cpu --max-seq-len 2147483648": "Expected at most 2,147,483,647",
    "--target cpu --batch 2 --max-seq-len 2000000000": "4,000,000,000 slots in the KV cache",
    "--target cpu --max-seq-len 2147483647": "2,147,483,648 slots in the KV cache",
    "--target cpu --max-seq-len 128 --spans 5": "--spans 5 exceeds the 4 blocks of the longest",
    "--target cpu -p decode{spans=129,block=8}": "spans=129 exceeds the 128 blocks of the longest",
    "--target cpu --policy zigzog": "Did you mean zigzag",
    "--target cpu --lowering head": "Did you mean heads",
    "--target cpu --rotary full": "'full' is not a valid value. Known: half, interleaved",
    "--target cpu --batch 0": "the batch size must be an integer of at least 1, got '0'",
    "--target cpu --context 600 --max-seq-len 512": "--max-seq-len, got 600 and 512 tokens",
    "--target cpu --tp 7": "Expected a tp from 1 to 6",
    "--target cpu --svg none/a.svg": "There is no directory none for a.svg",
    "--target cpu --svg . --trace a.json": ". is a directory",
    "--target cpu --svg a --trace a": "the same file",
    "--target cpu --svg a.svg --svg-layers 2": "the layers must be A:B with A less than B",
    "--target cpu --svg a.svg --svg-layers 1:1": "such as 0:2, got '1:1'",
    "--target cpu --svg a.svg --svg-layers 1:3": "must be a part of 0:2, got 1:3",
    "--target cpu --svg a.svg --trace a.json --svg-layers 2:3": "a part of 0:2",
    "--target cpu --svg-layers 0:1": "Add --svg F.svg",
    "--target cpu --text --json": "not allowed with",
    "--target cpu -p decode --spans 2": "options of the default pipeline",
    "--target cpu -p standard": "is not part of any decode instruction",
    "--target h200 --measured": "Expected --target cpu, or a file that tpcompile calibrate wrote",
    "--target h100 --measured --device cpu": "Choose where it runs: --device cuda",
    "--target cpu --measured --text": "--measured prints tables or JSON",
    "--target cpu --measured --threads 0": "the number of threads must be an integer of at least 1",
    "--target cpu --measured --threads 1025": "--threads must be at most 1,024, got 1,025",
    "--target cpu --threads 2": "--threads applies to --measured only",
    "--target cpu --measured --threads 2 --workers 3": "Found --workers 3 and --threads 2",
    "--tp 2": "--target",
}


@pytest.mark.parametrize("options", REFUSED)
def test_bad_input(cli: Cli, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.json").write_text('{"workers": 0}')
    ran = cli(f"schedule preset:tiny-qwen3 {options}")
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert REFUSED[options] in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["zero.json"]


def test_two_names_of_one_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to("a.json")
    files = ("--trace", str(tmp_path / "a.json"), "--svg", str(tmp_path / "link.svg"))
    ran = cli(CPU, *files)
    assert (ran.status, ran.out) == (2, "")
    assert "the same file" in ran.err


def test_a_pipeline_of_ones_own(cli: Cli) -> None:
    report = as_json(cli, f"{CPU} -p decode{{spans=2}}")
    assert (report["spans"], report["verified"]) == (2, True)


def test_the_spans_of_a_target_are_at_most_the_blocks(cli: Cli) -> None:
    report = as_json(cli, "schedule preset:tiny-qwen3 --target h200 --max-seq-len 65")
    assert (report["spans"], TARGETS["h200"].spans) == (1, 16)


def test_the_help_names_what_there_is(cli: Cli) -> None:
    text = " ".join(cli("schedule --help").out.split())
    for name in (*POLICIES, *TARGETS):
        assert name in text
