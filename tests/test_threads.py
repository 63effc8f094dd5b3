"""`threads=`: the workers of programs, and torch's threads for modules, on every kind of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompile
from tpcompile.backends.native import functions
from tpcompile.backends.torch_threads import torch_threads
from tpcompile.errors import UsageError
from tpcompile.options import check_threads
from tpcompile.runtime.model import CompiledModel
from tpcompile.vm.targets import TARGETS, target_text

pytestmark = pytest.mark.usefixtures("captured_once")
IDS = torch.tensor([[5, 9, 2, 7]])


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tpcompile.cores.cores", lambda: 6)
    with torch_threads(6):
        yield


@pytest.fixture
def prompt_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Provide the numbers of torch's threads while modules run."""
    numbers: set[int] = set()
    swiglu = functions.swiglu

    def counted(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        numbers.add(torch.get_num_threads())
        return swiglu(gate, up)

    monkeypatch.setattr(functions, "swiglu", counted)
    return numbers


def _compiled(**options: Any) -> CompiledModel:
    arguments = {"backend": "native", "max_seq_len": 64, "simulate": True, **options}
    return tpcompile.compile("preset:tiny-qwen3", random_weights=0, **arguments)


def _workers(model: CompiledModel) -> int:
    program = model.program.program
    return len(program.queues) * program.sharing // program.ranks


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize(
    ("options", "workers", "torchs"),
    [
        ({}, 6, 6),
        ({"tp": 2}, 3, 3),
        ({"tp": 3, "target": "cpu"}, 2, 2),
        ({"threads": 2}, 2, 2),
        ({"tp": 2, "threads": 7}, 7, 7),
        ({"tp": 2, "threads": 2, "policy": "dynamic"}, 2, 2),
    ],
)
def test_workers_and_torchs_threads(
    options: dict[str, Any], workers: int, torchs: int, prompt_threads: set[int]
) -> None:
    with _compiled(**options) as model:
        assert _workers(model) == workers
        model(IDS)
        assert (prompt_threads, torch.get_num_threads()) == ({torchs}, 6)


@pytest.mark.usefixtures("six_cores")
def test_threads_override_the_workers_of_a_target_file(
    tmp_path: Path, prompt_threads: set[int]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(target_text(TARGETS["cpu"]).replace('"workers": 2', '"workers": 3'))
    with _compiled(target=str(path)) as model:
        model(IDS)
        assert (_workers(model), prompt_threads) == (3, {6})
    prompt_threads.clear()
    with _compiled(target=str(path), threads=4) as model:
        model(IDS)
        assert (_workers(model), prompt_threads) == (4, {4})


def test_fewer_threads_of_torch_are_respected_by_default(
    monkeypatch: pytest.MonkeyPatch, prompt_threads: set[int]
) -> None:
    monkeypatch.setattr("tpcompile.cores.cores", lambda: 6)
    with _compiled() as model, torch_threads(2):
        model(IDS)
        assert prompt_threads == {2}
        with torch_threads(9):
            model(IDS)
    assert prompt_threads == {2, 6}


def test_results_have_the_same_bits() -> None:
    with _compiled(threads=1) as single, _compiled(threads=3) as threaded:
        assert torch.equal(
            single.generate(IDS, max_new_tokens=8), threaded.generate(IDS, max_new_tokens=8)
        )
        assert torch.equal(single(IDS).logits, threaded(IDS).logits)


def test_a_model_compiled_again_has_the_same_threads() -> None:
    with _compiled(threads=3) as model:
        assert model.made_by is not None
        with model.made_by() as again:
            assert _workers(again) == 3


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_gpu_has_no_threads() -> None:
    check_threads(None, torch.device("cuda"))
    with pytest.raises(UsageError, match=r"threads are those of a CPU, got device='cuda:1'"):
        check_threads(2, torch.device("cuda:1"))
