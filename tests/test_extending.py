"""The plugin under examples/, installed as a package, provides all its extensions by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests import scripts
from tpcompile.backends.native import build
from tpcompile.errors import UnsupportedError

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"
SIDES = ("program", "words")
Python = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of the plugin with pip; return the directory."""
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(
        PLUGIN, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True,
        timeout=300,
    )
    return target


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Granite model, which scales its embeddings."""
    config = AutoConfig.for_model(
        "granite",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        attention_multiplier=0.25,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("granite")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


_START = """
import os, sys
sys.path[:0] = [{installed!r}, {root!r}]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the interpreters of ranks
"""
_MAIN = """
import contextlib, io, json
from tpcompile.cli import main
found = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


class Ran(NamedTuple):
    """The exit status of a command and its output."""

    status: int
    out: str
    err: str


Run = Callable[..., list[Ran]]


@pytest.fixture
def python(installed: Path, tmp_path: Path) -> Python:
    """Return a function that runs a script with the plugin and returns its output."""

    def started(script: str, *arguments: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(_START.format(installed=str(installed), root=str(ROOT)) + script)
        done = scripts.run([str(path), *arguments], timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return started


@pytest.fixture
def run(python: Python) -> Run:
    """Return a function that runs tpcompile commands with the plugin, in one process."""

    def ran(*commands: str, before: str = "") -> list[Ran]:
        output = python(before + _MAIN, json.dumps([line.split() for line in commands]))
        return [Ran(*outcome) for outcome in json.loads(output)]

    return ran


def test_passes_and_pipelines_are_listed(run: Run) -> None:
    listed = run("passes")[0].out
    for name in ("drop-unit-scales", "fuse-scaled-embedding", "granite", "granite-decode"):
        assert re.search(rf"^  {name} ", listed, re.MULTILINE), listed


def test_a_program_has_the_instruction_policy_and_target(run: Run, granite: Path) -> None:
    options = "--tp 2 --target server-64 --policy mirrored --max-seq-len 64 --text"
    scheduled, policy, target = run(
        f"schedule {granite} {options} -p granite-decode{{spans=2}}",
        f"schedule {granite} --target cpu --policy mirrord -p granite-decode",
        f"schedule {granite} --target server-46 -p granite-decode",
    )
    assert len(re.findall(r"^  i\d+ scaled_embed ", scheduled.out, re.MULTILINE)) == 2
    assert "scale=12" in scheduled.out
    assert (policy.status, "Did you mean mirrored" in policy.err) == (2, True)
    assert (target.status, "Did you mean server-64" in target.err) == (2, True)


def test_the_backend_generates_what_hugging_face_does(run: Run, granite: Path) -> None:
    """The backend gives eager's tokens on two processes, whose workers import the plugin too."""
    ids = torch.tensor([[5, 9, 2]])
    eager = AutoModelForCausalLM.from_pretrained(granite).eval()
    wanted = eager.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
    options = "--tp 2 --prompt-ids 5,9,2 --max-new-tokens 6 -p granite --backend"
    *done, misspelt = run(
        f"generate {granite} {options} words",
        f"generate {granite} {options} torch",
        f"generate {granite} --prompt-ids 1 --backend wrods",
    )
    assert [outcome.out for outcome in done] == [",".join(map(str, wanted)) + "\n"] * 2
    assert (misspelt.status, "Did you mean words" in misspelt.err) == (2, True)


def test_the_backend_is_compared_value_by_value(run: Run) -> None:
    """Its executor runs instructions one by one; the comparison has all values of its program."""
    line = "compare preset:tiny-qwen3 --tp 2 --random-weights 0 --backend words --lengths 5"
    (compared,) = run(f"{line} --json")
    rows = json.loads(compared.out)["rows"]
    sides = {side: [row["node"] for row in rows if row["side"] == side] for side in SIDES}
    assert compared.status == 0, compared.err
    assert sides["program"] == sides["words"]
    assert {"norm", "q_rotated", "token"} < set(sides["words"])


_SOURCE = """
import tpcompile
model = tpcompile.compile(sys.argv[1], tp=2, simulate=True, pipeline="granite")
sys.stdout.write(model.source(rank=1))
"""


def test_its_op_is_written_as_it_says(python: Python, granite: Path) -> None:
    wanted = "tpc.vocab_embedding(self.embed_tokens_weight, input_ids, 48) * 12.0  #"
    assert f"        scaled_embedding = {wanted}" in python(_SOURCE, str(granite))


def test_text_with_its_ops_is_read_back(run: Run, granite: Path, tmp_path: Path) -> None:
    dumped, verified, printed = run(
        f"dump {granite} --tp 3 -p granite -o {tmp_path / 'graph.txt'}",
        f"opt {tmp_path / 'graph.txt'} --verify-only",
        f"opt {tmp_path / 'graph.txt'}",
    )
    assert (dumped.status, verified.status) == (0, 0), dumped.err + verified.err
    text = (tmp_path / "graph.txt").read_text()
    assert printed.out == text
    assert "tpc.scaled_embedding(" in text


_LIBRARY = """
from tpcompile import plugins
from tpcompile.backends.native import build
plugins.load_plugins()
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
assert "scaled_embed" in INSTRUCTIONS
sys.stdout.write(build.sources().key("c++"))
"""


def test_kernels_are_not_built_again_for_its_instruction(python: Python) -> None:
    assert python(_LIBRARY) == build.sources().key("c++")


def test_the_model_is_refused_without_the_plugin(granite: Path) -> None:
    """Modules run it, but no instruction multiplies an embedding."""
    with pytest.raises(UnsupportedError, match=r"aten\.mul\(%embedding, other=12\.0\)"):
        tpcompile.schedule(str(granite))


_PLACE = """
import torch
from transformers import AutoModelForCausalLM
import tpcompile
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.rotation import rotation_of
from tpcompile.backends.reference.regions import verify_regions
from tpcompile.errors import CompileError
from tpcompile.frontend import capture
from tpcompile.ir.simulate import materialise
from tpcompile.passes import run_passes
from tpcompile.plugins import load_plugins

load_plugins()
from tpcompile_granite.instruction import ScaledEmbed
from tpcompile_granite.passes import GraniteDecode

eager = AutoModelForCausalLM.from_pretrained({model!r})
captured = capture(eager)
passes = GraniteDecode().passes()
step = tpcompile.schedule(eager, target="server-64", pipeline=passes, max_seq_len=64, batch=2)
graph, _ = run_passes(captured.graph, passes)
tensors = eager.state_dict()
weights = materialise(graph, lambda name, part: tensors[name][part])
rotation = rotation_of(step.program, captured.rotary.fresh())
memory = StepMemory(step.program, lambda rank, name: weights[name][rank].contiguous(), rotation)
memory.place(torch.tensor([5]), torch.tensor([1]), torch.tensor([[0]]))
{change}
try:
    verify_regions(memory)
except CompileError as error:
    print(error)
else:
    print("true")
"""


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ("", "true"),
        (
            "ScaledEmbed.reads = property(lambda instruction: ())",
            "The regions of scaled_embed are wrong: it writes x0 from undeclared reads",
        ),
    ],
    ids=["correct", "reads omitted"],
)
def test_the_regions_of_the_instruction_are_checked(
    python: Python, granite: Path, change: str, output: str
) -> None:
    assert python(_PLACE.format(model=str(granite), change=change)).startswith(output)


_BREAKS = """
from tpcompile.plugins import load_plugins
load_plugins()
from tpcompile_granite import passes
insert = passes.insert
passes.insert = lambda like, op, table, ids, *rest: insert(like, op, table, table, *rest)
"""


def test_a_pass_that_breaks_types_is_named(run: Run, granite: Path) -> None:
    """A pass that looks up table rows by the table itself is named in the error."""
    (dumped,) = run(f"dump {granite} --tp 1 -p granite", before=_BREAKS)
    assert dumped.status == 1
    assert "The pass fuse-scaled-embedding left an invalid graph" in dumped.err
