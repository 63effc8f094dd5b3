"""The backend that `backend="auto"` chooses, and why it falls back to modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tpcompile
from tests.runtime.eager_pair import lively
from tpcompile import cpp
from tpcompile.backends.native import build
from tpcompile.backends.native.executor import Native
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.passes import default_pipeline
from tpcompile.runtime.backend import BackendChoice
from tpcompile.runtime.programs import ProgramOptions
from tpcompile.runtime.ranks.in_process import InProcessRanks

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler."""
    build.library.cache_clear()
    monkeypatch.setattr(cpp, "_COMPILERS", ("no-such-compiler",))
    yield
    build.library.cache_clear()


def test_the_interpreter_is_said_to_be_slow() -> None:
    """The kernel runs without a GPU too, in Triton's interpreter."""
    with pytest.warns(UserWarning, match=r"interpreter runs the kernel.*slower.*native") as told:
        tpcompile.compile(lively("tiny-qwen3"), backend="triton", max_seq_len=32).close()
    assert len(told) == 1 and told[0].filename == __file__


def test_auto_decodes_natively() -> None:
    eager, ids = lively("tiny-qwen3"), torch.arange(5, 17)[None]
    with tpcompile.compile(eager) as model:
        assert model.backend == "native"
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert model.steps.program == 4
        assert model.steps.modules == 1
    assert tokens.tolist() == eager.generate(ids, max_new_tokens=5, do_sample=False).tolist()


def test_auto_selects_the_kernel_on_a_gpu() -> None:
    for options in (ProgramOptions(), ProgramOptions(spans=2)):
        assert BackendChoice("auto", torch.device("cuda"), options).name == "triton"


@pytest.mark.usefixtures("without_compiler")
def test_auto_falls_back_to_modules_with_one_warning() -> None:
    eager = lively("tiny-qwen3")
    with pytest.warns(UserWarning, match=r"needs a C\+\+ compiler") as caught:
        model = tpcompile.compile(eager)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning names the line that calls compile"
    with model:
        assert model.backend == "torch"
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        assert model.steps[:2] == (0, 3)
        with pytest.raises(UnsupportedError, match="has no program"):
            _ = model.program


@pytest.mark.usefixtures("without_compiler")
def test_a_named_backend_does_not_fall_back() -> None:
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        tpcompile.compile(lively("tiny-qwen3"), backend="native")


@pytest.mark.usefixtures("without_compiler")
def test_options_of_programs_do_not_fall_back() -> None:
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        tpcompile.compile(lively("tiny-qwen3"), policy="wave")


def test_an_executor_that_cannot_run_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: object, device: object) -> None:
        raise UnsupportedError("No kernel for this program")

    monkeypatch.setattr(Native, "check", refuse)
    with pytest.warns(UserWarning, match="No kernel for this program"):
        model = tpcompile.compile(lively("tiny-qwen3"))
    assert model.backend == "torch"
    model.close()


def test_ranks_that_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ranks: object) -> None:
        raise UnsupportedError("Ranks that run a program must be on one machine")

    monkeypatch.setattr(InProcessRanks, "check_programs", refuse)
    with pytest.warns(UserWarning, match="must be on one machine") as caught:
        model = tpcompile.compile(lively("tiny-qwen3"))
    assert caught[0].filename == __file__
    assert model.backend == "torch"
    model.close()


def test_a_model_that_cannot_decode_needs_no_warning() -> None:
    passes = [current for current in default_pipeline() if current.name != "cache-kv"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tpcompile.compile(lively("tiny-qwen3"), pipeline=passes)
    assert model.backend == "torch"
    model.close()


def test_modules_have_no_options_of_programs() -> None:
    with pytest.raises(UsageError, match="Modules have no target"):
        tpcompile.compile(lively("tiny-qwen3"), backend="torch", spans=2)


def test_a_prompt_of_one_token_is_a_decode_step() -> None:
    """The program is then loaded before the cache has any block."""
    eager = lively("tiny-qwen3")
    with tpcompile.compile(eager, backend="native") as model:
        logits = model(torch.tensor([[5]])).logits
        assert model.steps[:2] == (1, 0)
    torch.testing.assert_close(logits, eager(torch.tensor([[5]])).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_threads_that_generate_at_the_same_time(backend: str) -> None:
    """Their steps take turns, and none sees the inputs of another."""
    prompts = [torch.tensor([[n + 1, 7 * n + 2, 3]]) for n in range(4)]
    with tpcompile.compile(lively("tiny-qwen3"), backend=backend) as model:

        def continued(ids: torch.Tensor) -> list[list[int]]:
            tokens: list[list[int]] = model.generate(
                ids, max_new_tokens=40, do_sample=False, pad_token_id=0
            ).tolist()
            return tokens

        wanted = [continued(ids) for ids in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            for _ in range(3):
                assert list(pool.map(continued, prompts)) == wanted
