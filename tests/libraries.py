"""Run a short list of tests on the libraries of this environment, after printing their versions.

python -m tests.libraries                # as `make test-newest` and `make test-oldest` do
python -m tests.libraries -- -n 2 -x     # arguments for pytest
python -m tests.libraries --oldest       # print pip's constraints for the oldest libraries
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

TESTS = (
    # the demo, generation and chat
    *("tests/demo", "tests/cli/test_make_demo.py", "tests/cli/test_generate.py"),
    *("tests/cli/test_chat.py", "tests/cli/test_compare.py", "tests/cli/test_explore.py"),
    "tests/test_api.py",
    # the interface of Hugging Face's models, pipelines and evaluation harness
    *("tests/runtime/test_cache_name.py", "tests/runtime/test_arguments.py"),
    *("tests/runtime/test_model.py", "tests/runtime/test_generate.py"),
    *("tests/runtime/test_generation.py", "tests/runtime/test_launches.py"),
    *("tests/runtime/test_conversation.py", "tests/runtime/test_text.py"),
    *("tests/runtime/test_pipeline.py", "tests/runtime/test_lm_eval.py", "tests/runtime/kv"),
    # capture of each family of models
    "tests/frontend",
    # executors, and ranks in processes
    *("tests/backends/native", "tests/backends/triton", "tests/runtime/ranks"),
    # the server, also with Ray
    *("tests/serving/test_server.py", "tests/serving/test_engine.py"),
    *("tests/serving/test_batch.py", "tests/serving/test_replicas.py", "tests/cli/test_serve.py"),
    # tools and structured output, and guessed tokens
    *("tests/serving/test_matcher.py", "tests/serving/test_structured.py"),
    "tests/serving/speculation/test_prompt.py",
    # proofs of passes and of programs
    *("tests/ir/values", "tests/vm/proof/test_computes.py"),
    # the explorer
    *("tests/inspect/explorer", "tests/test_exploring.py"),
)
"""The tests of what depends most on other libraries."""

EXTRAS = ("triton", "serve", "ray")
"""The extras that users install."""

_OF_THAT_TIME = ("protobuf<7",)
"""What the oldest libraries need and do not declare: Ray 2.50 fails with protobuf 7."""

ROOT = Path(__file__).parents[1]
_BOUNDED = re.compile(r"([A-Za-z0-9_-]+)(?:\[.*\])?>=([0-9.]+)")


def declared() -> dict[str, str]:
    """Return the lower bound of each library that users install, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    return dict(_bounds([*project["dependencies"], *(item for extra in extras for item in extra)]))


def _bounds(requirements: Sequence[str]) -> Iterator[tuple[str, str]]:
    for requirement in requirements:
        if not requirement.startswith("tpcompile["):
            bounded = _BOUNDED.match(requirement)
            if bounded is None:
                raise SystemExit(f"{requirement!r} of pyproject.toml must have a lower bound")
            yield bounded[1], bounded[2]


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--oldest"]:
        sys.stdout.writelines(f"{name}=={lowest}.*\n" for name, lowest in declared().items())
        sys.stdout.writelines(f"{requirement}\n" for requirement in _OF_THAT_TIME)
        return 0
    installed = ", ".join(f"{name} {version(name)}" for name in declared())
    sys.stdout.write(f"Python {platform.python_version()}, {installed}\n")
    sys.stdout.flush()
    options = [word for word in arguments if word != "--"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS, *options], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
