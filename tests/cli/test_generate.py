"""Tests of `tpcompile generate`: its text, timings and refusals."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import scripts
from tests.cli.conftest import Cli
from tests.cli.test_main import HEAVY, python
from tests.inspect.test_step_trace import check_both
from tests.inspect.trace_format import read_trace
from tests.models import preset_pair
from tpcompile import api
from tpcompile.demo import make_demo
from tpcompile.errors import RankError

pytestmark = pytest.mark.usefixtures("forked_launchers")

TINY = "preset:tiny-qwen3 --random-weights 0"
PROMPT = "Anna is a baker"
KEYS = ["text", "tokens", "prompt_tokens", "new_tokens", "prefill_s", "decode_tokens_per_s"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a demo model for a few steps, and save it with its tokenizer."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(directory, steps=8)
    return directory


@pytest.fixture(scope="module")
def expected(demo: Path) -> tuple[list[int], str]:
    """Return Hugging Face's continuation of the prompt as ids and as text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    eager: Any = AutoModelForCausalLM.from_pretrained(demo).eval()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    tokens = eager.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_text_is_hugging_faces_and_stdout_holds_nothing_else(
    cli: Cli, demo: Path, expected: tuple[list[int], str]
) -> None:
    ran = cli(f"generate {demo} --max-new-tokens 12 --prompt", PROMPT)
    assert (ran.status, ran.out) == (0, expected[1] + "\n")
    assert re.fullmatch(
        r"4 prompt tokens, first token after \d+\.\d\d s, 12 new tokens, "
        r"then \d+\.\d tokens per second; 11 of 12 steps by the program\n",
        ran.err,
    )


def test_ranks_of_their_own_and_json(cli: Cli, demo: Path, expected: tuple[list[int], str]) -> None:
    report = json.loads(
        cli(f"generate {demo} --tp 2 --max-new-tokens 12 --json --prompt", PROMPT).out
    )
    assert list(report) == KEYS
    assert (report["tokens"], report["text"]) == expected
    assert (report["prompt_tokens"], report["new_tokens"]) == (4, 12)
    assert report["prefill_s"] > 0
    assert report["decode_tokens_per_s"] > 0


def test_steps_of_the_program_are_counted(cli: Cli) -> None:
    """The program runs all steps after prefill; the tokens equal the torch backend's."""
    options = "--tp 2 --prompt-ids 5,9 --max-new-tokens 6 --max-seq-len 64"
    ran, plain = (cli(f"generate {TINY} {options} --backend {b}") for b in ("reference", "torch"))
    assert ran.err.endswith(" tokens per second; 5 of 6 steps by the program\n")
    assert ran.out == plain.out


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_threads_of_a_rank(cli: Cli, backend: str) -> None:
    before = torch.get_num_threads()
    options = f"--prompt-ids 5,9 --max-new-tokens 6 --max-seq-len 64 --backend {backend}"
    ran, plain = (cli(f"generate {TINY} {options} {more}") for more in ("-v --threads 3", ""))
    assert ran.out == plain.out and ran.status == 0
    assert ("instructions on 3 workers per rank" in ran.err) == (backend == "native")
    assert torch.get_num_threads() == before


def test_one_token_has_no_rate(cli: Cli) -> None:
    ran = cli(f"generate {TINY} --prompt-ids 5 --max-new-tokens 1 --json")
    assert json.loads(ran.out)["decode_tokens_per_s"] is None
    assert "1 new tokens; " in ran.err


def test_text_is_shown_as_it_comes_on_a_terminal(
    cli: Cli, demo: Path, expected: tuple[list[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        shown = 0

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.shown += 1

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli(f"generate {demo} --max-new-tokens 12 --prompt", PROMPT).status == 0
    assert terminal.getvalue() == expected[1] + "\n"
    assert terminal.shown > 4


def test_an_invalid_graph_is_status_1(cli: Cli, broken_pipeline: str) -> None:
    ran = cli(f"generate {TINY} --tp 2 --prompt-ids 1 -p", broken_pipeline)
    assert (ran.status, ran.out) == (1, "")
    assert "The pass drop-collective left an invalid graph" in ran.err


def test_ids_in_ids_out(cli: Cli) -> None:
    eager = preset_pair("tiny-qwen3").eager
    tokens = eager.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    ran = cli(f"generate {TINY} --prompt-ids 5,6,7 --max-new-tokens 6")
    assert ran.out == ",".join(map(str, tokens[0].tolist())) + "\n"


def test_ids_of_a_model_with_a_tokenizer_give_text(
    cli: Cli, demo: Path, expected: tuple[list[int], str]
) -> None:
    prompt = ",".join(map(str, expected[0][:4]))
    ran = cli(f"generate {demo} --prompt-ids {prompt} --max-new-tokens 12")
    assert ran.out == expected[1] + "\n"


def _sampled(cli: Cli, options: str) -> str:
    return cli(f"generate {TINY} --prompt-ids 5,6,7 --max-new-tokens 16 {options}").out


def test_tokens_are_drawn_by_the_seed(cli: Cli) -> None:
    drawn = _sampled(cli, "--sample --seed 1")
    assert drawn == _sampled(cli, "--sample --seed 1")
    assert len({drawn, _sampled(cli, "--sample --seed 2"), _sampled(cli, "")}) == 3


def test_a_temperature_draws_and_near_zero_it_takes_the_best(cli: Cli) -> None:
    best = _sampled(cli, "")
    assert _sampled(cli, "--temperature 5 --top-k 900 --top-p 1") != best
    assert _sampled(cli, "--temperature 1e-6") == best
    assert _sampled(cli, "--temperature 0") == best
    assert _sampled(cli, "--temperature 0 --sample --top-k 900") == best
    assert _sampled(cli, "--top-k 1") == best
    assert _sampled(cli, "--top-p 1e-9") == best


def test_beams(cli: Cli) -> None:
    eager = preset_pair("tiny-qwen3").eager
    tokens = eager.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=16, num_beams=3,
                           do_sample=False)  # fmt: skip
    assert _sampled(cli, "--beams 3") == ",".join(map(str, tokens[0].tolist())) + "\n"


def test_chat_prints_the_answer_alone(
    cli: Cli, demo: Path, expected: tuple[list[int], str], tmp_path: Path
) -> None:
    """The answer is printed without the prompt, here with a template that adds nothing."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    tokenizer.save_pretrained(tmp_path)
    ran = cli(f"generate {tmp_path} --chat --max-new-tokens 12 --prompt", PROMPT)
    assert PROMPT + ran.out == expected[1] + "\n"


def test_special_tokens_are_no_text(cli: Cli, demo: Path) -> None:
    ran = cli(f"generate {demo} --max-new-tokens 1 --prompt", f"<|endoftext|>{PROMPT}")
    assert ran.out.startswith(PROMPT)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Path:
    """Create `bare` without a tokenizer, `torn` with a truncated one, and `empty`."""
    root = tmp_path_factory.mktemp("directories")
    for name in ("bare", "torn"):
        (root / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (root / name / file).write_bytes((demo / file).read_bytes())
    (root / "torn" / "tokenizer.json").write_text("{")
    (root / "empty").mkdir()
    return root


SMALL_STARCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

BAD = {
    "{0}/nowhere --prompt x": "There is no directory",
    "{0}/empty --prompt x": "contains no model",
    "{0}/bare --prompt x": "holds no tokenizer",
    "{0}/torn --prompt x": "cannot be read. Found JSONDecodeError",
    "preset:tiny-qwen4 --prompt x": "Did you mean tiny-qwen3",
    f"{TINY} --prompt x": "has no tokenizer. Pass token ids to tpcompile generate: --prompt-ids",
    "preset:tiny-qwen3 --prompt-ids 1": "without weights. Pass a checkpoint, or --random-weights",
    f"{TINY} --prompt x --prompt-ids 1": "not allowed with",
    f"{TINY} --prompt ''": "The prompt is empty",
    f"{TINY} --prompt-ids 1 --threads 0": "the number of threads must be an integer of at least 1",
    f"{TINY} --prompt-ids 1 --threads 1025": "--threads must be at most 1,024, got 1,025",
    f"{TINY} --prompt-ids 1,x": "each token id must be an integer of at least 0, got 'x'",
    f"{TINY} --prompt-ids 1013": "Every token of --prompt-ids must be in the vocabulary. "
    "Found 1013. Expected 0 to 1012",
    f"{TINY} --prompt-ids 1 --chat": "--chat requires a prompt in text",
    "{1} --prompt x --chat": "no chat template",
    f"{TINY} --prompt-ids 1,2 --max-new-tokens 511": "Give --max-new-tokens 510 or less",
    f"{TINY} --prompt-ids 1,2,3 --max-seq-len 3": "Shorten the prompt",
    f"{TINY} --prompt-ids 1 --max-new-tokens 0": "must be an integer of at least 1, got '0'",
    f"{TINY} --prompt-ids 1 --temperature -1": "must be a finite number of at least 0, got '-1'",
    f"{TINY} --prompt-ids 1 --top-p 1.5": "must be more than 0 and at most 1, got '1.5'",
    f"{TINY} --prompt-ids 1 --beams 0": "the number of beams must be an integer of at least 1",
    f"{TINY} --prompt-ids 1 --tp 7": "6 query heads",
    f"{TINY} --prompt-ids 1 --backend torch --trace a.json": "Found --backend torch. Expected "
    "--backend native or --backend triton",
    f"{TINY} --prompt-ids 1 --backend native --trace none/a.json": "There is no directory none",
    f"{TINY} --prompt-ids 1 --backend tourch": "Did you mean torch",
    f"{TINY} --prompt-ids 1 --device tpu9": "--device must be cpu or cuda, got 'tpu9'",
    f"{TINY} --prompt-ids 1 --device cuda": "--device cuda needs a GPU, but torch finds no GPU",
    f"{TINY} --prompt-ids 1 -p canonicalize": "without a KV cache",
    f"{TINY} --prompt-ids 1 --tp 2 -p canonicalize": "does not shard the graph, which --tp 2",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(cli: Cli, directories: Path, demo: Path, line: str) -> None:
    words = [word.strip("'").format(directories, demo) for word in line.split()]
    ran = cli("generate", *words)
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert BAD[line] in ran.err


@pytest.mark.parametrize(("backend", "tp"), [("native", 1), ("native", 2), ("auto", 1)])
def test_a_trace_of_the_last_step(cli: Cli, tmp_path: Path, backend: str, tp: int) -> None:
    trace = tmp_path / "a.json"
    line = f"generate {TINY} --prompt-ids 1,2,3 --max-seq-len 64 --backend {backend} --tp {tp}"
    plain = cli(f"{line} --max-new-tokens 4")
    ran = cli(f"{line} --max-new-tokens 4 --trace", str(trace))
    assert (ran.status, ran.out) == (0, plain.out)
    assert "µs, predicted and measured" in ran.err
    assert ran.err.endswith(f"wrote {trace}\n")
    events = read_trace(trace.read_text(encoding="utf-8"))
    check_both(events, len({e["args"]["instruction"] for e in events if e["ph"] == "X"}), tp)


def test_a_trace_of_the_triton_kernel(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "a.json"
    line = f"generate {TINY} --prompt-ids 1,2,3 --max-seq-len 64 --backend triton"
    ran = cli(f"{line} --max-new-tokens 2 --trace", str(trace))
    assert ran.status == 0 and "µs, predicted and measured" in ran.err
    events = read_trace(trace.read_text(encoding="utf-8"))
    check_both(events, len({e["args"]["instruction"] for e in events if e["ph"] == "X"}))


@pytest.mark.filterwarnings("always:Torch modules run decode steps")
def test_no_trace_of_modules(cli: Cli, tmp_path: Path) -> None:
    """If the automatic backend cannot run a model, the text is there, and the reason in full."""
    config = AutoConfig.for_model("starcoder2", **SMALL_STARCODER)
    config.save_pretrained(tmp_path / "model")
    trace = tmp_path / "a.json"
    line = f"generate {tmp_path / 'model'} --random-weights 0 --prompt-ids 1,2 --max-new-tokens 2"
    ran = cli(f"{line} --trace", str(trace))
    assert (ran.status, trace.exists()) == (0, False)
    assert ran.err.startswith("warning: Torch modules run decode steps")
    assert ran.err.endswith(f"warning: {trace} is not written: torch modules run all steps\n")


def test_no_trace_without_a_decode_step(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "a.json"
    line = f"generate {TINY} --prompt-ids 1,2,3 --max-new-tokens 1 --backend native --trace"
    ran = cli(line, str(trace))
    assert (ran.status, trace.exists()) == (0, False)
    assert ran.err.endswith(f"warning: {trace} is not written: no step was run by the program\n")


def test_without_a_limit_there_are_as_many_tokens_as_there_is_room(cli: Cli) -> None:
    ran = cli(f"generate {TINY} --prompt-ids 5,6,7 --max-seq-len 9")
    assert ran.out.count(",") + 1 == 9


@pytest.mark.parametrize("words", [["--prompt", " "], ["--prompt-ids", "1", "--chat"]])
def test_what_is_refused_at_once_imports_nothing_heavy(words: list[str]) -> None:
    ran = python("-c", HEAVY, "generate", *TINY.split(), *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "AssertionError" not in ran.stderr


def test_a_failed_rank_is_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RankError("Rank 1 was killed by signal SIGKILL")

    monkeypatch.setattr(api, "compile", fail)
    ran = cli(f"generate {TINY} --prompt-ids 1")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "error: Rank 1 was killed by signal SIGKILL.\n"


def _group_is_gone(group: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_ends_all_ranks(demo: Path) -> None:
    """Ctrl-C on a terminal signals all processes; here it is sent after the first text."""
    command = ["-m", "tpcompile", "generate", str(demo), "--tp", "2", "--sample"]
    command += ["--max-new-tokens", "500", "--prompt", PROMPT]
    master, terminal = os.openpty()
    with open(master, "rb", buffering=0) as shown, tempfile.TemporaryFile("w+") as errors:
        started = scripts.start(command, terminal, errors.fileno())
        os.close(terminal)
        assert shown.read(1) == b"A"
        os.killpg(started.pid, signal.SIGINT)
        status = started.wait(30)
        errors.seek(0)
        assert (status, errors.read()) == (130, "interrupted\n")
    assert _group_is_gone(started.pid)


def test_torchrun(demo: Path, expected: tuple[list[int], str]) -> None:
    """Under torchrun `--tp` defaults to the number of processes, and only rank 0 prints."""
    command = ["-m", "tpcompile", "generate", str(demo), "--max-new-tokens", "12"]
    ran = scripts.run([*command, "--prompt", PROMPT], ranks=2)
    assert (ran.returncode, ran.stdout) == (0, expected[1] + "\n"), ran.stderr
    assert ran.stderr.count("new tokens") == 1
