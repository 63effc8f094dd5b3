"""Documentation and examples match the tool's behaviour."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import tpcompile
from tests import scripts
from tests.stages import graph_after
from tpcompile.cli import main

pytestmark = pytest.mark.usefixtures("captured_once")
ROOT = Path(__file__).parents[1]


def _python_blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Provide a function that runs a script in this process and returns its output."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("page", ["ir", "program"])
def test_a_page_is_what_the_tool_prints(page: str, run_here: Callable[..., str]) -> None:
    printed = run_here(f"docs/make_{page}_page.py", "--print")
    expected = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert printed == expected, f"docs/{page}.md is stale: run `make docs`"


def test_the_worked_pass_of_the_page_works() -> None:
    import torch
    from torch import fx

    from tests.models import batch, preset_pair, stage_logits
    from tpcompile.errors import PassError
    from tpcompile.ir.ops import SPECS
    from tpcompile.passes import default_pipeline

    blocks = _python_blocks("writing-a-pass.md")
    assert len(blocks) == 8
    space: dict[str, object] = {"__name__": __name__}
    known = set(SPECS)
    for block in blocks:
        exec(compile(block, "writing-a-pass.md", "exec"), space)
    for target in set(SPECS) - known:
        del SPECS[target]  # the op of the page

    pair, packed = preset_pair("tiny-qwen3"), batch((4, 9))
    packed.logit_rows.copy_(torch.arange(len(packed.logit_rows)).flip(0))
    plain = graph_after(pair, default_pipeline(2))
    changed = space["graph"]
    assert isinstance(changed, fx.GraphModule)
    assert torch.equal(stage_logits(changed, pair, packed), stage_logits(plain, pair, packed))

    wrong = blocks[1].replace('bindings["x"], 0,', 'bindings["x"], 1,')
    assert wrong != blocks[1]
    exec(compile(wrong, "writing-a-pass.md", "exec"), space)
    with pytest.raises(PassError, match="rows-first") as caught:
        exec(compile(blocks[3], "writing-a-pass.md", "exec"), space)
    assert "fuse-gate-up" in str(caught.value)
    assert "%normed" in str(caught.value)


def test_the_check_of_regions_of_the_page_works() -> None:
    """The block runs as it is printed; with an undeclared read it names the instruction."""
    from tpcompile.errors import CompileError
    from tpcompile.vm.groups.embed import Embed

    (block,) = _python_blocks("extending.md")
    code = compile(block, "extending.md", "exec")
    exec(code, {"__name__": __name__})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embed, "reads", property(lambda instruction: ()))
        with pytest.raises(CompileError, match=r"regions of embed are wrong"):
            exec(code, {"__name__": __name__})


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_code_of_a_page_is_in_blocks(page: str) -> None:
    """Python in an indented block is not found by the tests that run the blocks of pages."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4}(?:from|import) \w.*", prose, re.MULTILINE) == []


EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}
NEED_A_CHECKPOINT = {"03_generate_tp2.py", "04_torchrun.py"}


def _run(*arguments: str, ranks: int = 0) -> str:
    """Run an example in its own process, or in one per rank, and return its output."""
    completed = scripts.run(arguments, ranks=ranks)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout
    return completed.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES - NEED_A_CHECKPOINT))
def test_examples_run(example: str, run_here: Callable[..., str]) -> None:
    assert run_here(f"examples/{example}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train the demo model for a few steps, which suffices for comparisons."""
    from tpcompile.demo import make_demo

    directory = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(directory, steps=8)
    return str(directory)


BLOCKS = {"README.md": "build/demo", "docs/running.md": "path/to/checkpoint"}


@pytest.mark.parametrize("page", BLOCKS)
def test_the_first_block_of_a_page_works(
    page: str, demo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script has the block of the page, with the directory of a checkpoint that exists."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    assert f'"{BLOCKS[page]}"' in block
    script = tmp_path / "block.py"
    body = block.replace(BLOCKS[page], demo)
    script.write_text(f"{body}\nprint(model.steps.program, 'steps by the program')\n")
    assert re.search(r"^[1-9]\d* steps by the program$", _run(str(script)), re.MULTILINE)


def test_the_engine_of_the_page_works(demo: str) -> None:
    from transformers import AutoTokenizer

    block = _python_blocks("serving.md")[0].replace("./my-checkpoint", demo)
    space: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(demo)}
    exec(compile(block, "serving.md", "exec"), space)
    space["engine"].close()
    space["model"].close()


def test_the_blocks_of_the_python_page_work(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in _python_blocks("python.md"):
        exec(compile(block.replace("build/demo", demo), "python.md", "exec"), space)
    assert Path("step.svg").stat().st_size and Path("demo-int4/config.json").exists()


def test_the_python_page_names_every_argument() -> None:
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    functions = (
        *(tpcompile.compile, tpcompile.schedule, tpcompile.quantize, tpcompile.capture),
        *(tpcompile.Engine, tpcompile.SamplingParams),
    )
    arguments = [name for function in functions for name in signature(function).parameters]
    missing = {name for name in arguments if f"`{name}`" not in text}
    assert not missing
    assert [name for name in tpcompile.__all__ if name not in text] == []


def _values(document: Any, path: str) -> list[Any]:
    """Return the values at a path such as `ranks[].rank`; `NAME` stands for any key."""
    values = [document]
    for key in path.replace("[]", ".[]").split("."):
        if key == "[]":
            values = [element for value in values for element in value]
        elif key == "NAME":
            values = [element for value in values for element in value.values()]
        else:
            values = [value[key] for value in values]
    return values


def _documented() -> list[tuple[str, list[str]]]:
    """Return the commands of docs/json.md, each with the paths of its keys."""
    text = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    sections = re.split(r"^`tpcompile (.*)`$", text, flags=re.MULTILINE)[1:]
    tables = (re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for section in sections[1::2])
    return [
        (command, re.findall(r"`([^`]+)`", " ".join(rows)))
        for command, rows in zip(sections[::2], tables, strict=True)
    ]


@pytest.mark.parametrize(("command", "paths"), _documented(), ids=lambda value: str(value)[:12])
def test_documented_keys_are_in_the_output(
    command: str, paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 0
    document = json.loads(capsys.readouterr().out)
    assert paths
    for path in paths:
        assert _values(document, path), path


def test_generating_on_two_ranks(demo: str) -> None:
    output = _run("examples/03_generate_tp2.py", demo)
    assert output.count("\n") == 4, "three texts and the verdict; ranks do not run the script"
    assert output.endswith("all 96 tokens are equal to those of Hugging Face eager\n")


def test_an_example_under_torchrun(demo: str, run_here: Callable[..., str]) -> None:
    output = _run("examples/04_torchrun.py", demo, ranks=2)
    assert output.startswith("2 ranks: Anna is")
    assert output.count("ranks:") == 1
    assert run_here("examples/04_torchrun.py", demo) == output.replace("2 ranks", "1 ranks")


def test_the_dump_of_the_readme_is_what_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's dump matches the tool's output line by line; ellipses match any text."""
    from tpcompile.cli import main

    assert main(["dump", "preset:tiny-qwen3", "--tp", "4"]) == 0
    printed = capsys.readouterr().out
    (block,) = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    for line in block.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(pattern, printed), line


def test_the_presets_of_the_readme_are_those_of_the_tool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tpcompile.cli import main

    assert main(["presets"]) == 0
    shown = f"```console\n$ tpcompile presets\n{capsys.readouterr().out}```\n"
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_of_the_readme_work_on_a_package_index() -> None:
    """An index shows the README without the repository, and gives its headings no anchors."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    images = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", prose)
    assert images
    for words, path in images:  # an index shows the words
        assert len(words.split()) > 5 and (ROOT / path).is_file(), path
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    linked = re.findall(r"\]\(([^)]*)\)", prose)
    assert linked
    assert [target for target in linked if not target.startswith("https://")] == []
    assert re.findall(r"\]\[|^\[[^\]]+\]:|<(?:a|img)\b", prose, re.MULTILINE) == []


COMMANDS_OF_PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("running", "quantization", "serving")),
]


@pytest.mark.parametrize("page", COMMANDS_OF_PAGES)
def test_command_lines_of_a_page_are_valid(page: str) -> None:
    """Every tpcompile command in a shell block names a command, and options that it has."""
    from tpcompile.cli import COMMANDS

    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^(?:\$ )?(?:torchrun.* -m )?tpcompile (.*)$", "\n".join(blocks), re.M)
    assert commands
    for line in commands:
        name, *words = shlex.split(line, comments=True)
        COMMANDS[name].parser(f"tpcompile {name}").parse(words)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tpcompile|tests|docs|benchmarks|examples)/[\w./]*)`", text)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the titles of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


PAGES = [
    str(path.relative_to(ROOT))
    for folder in ("", "docs/", "benchmarks/")
    for path in sorted(ROOT.glob(f"{folder}*.md"))
]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    """Sections that other pages refer to cannot vanish."""
    path = ROOT / page
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in _anchors(linked), target


def test_every_room_is_described() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent for path in (ROOT / "tpcompile").rglob("__init__.py")}
    listed = {ROOT / path for path in re.findall(r"^\| `(tpcompile/[\w/]*)` \|", text, re.M)}
    for room in rooms - {ROOT / "tpcompile"}:
        assert any(room.is_relative_to(path) or path.is_relative_to(room) for path in listed), room
