"""Tests of the checks that commands make before they compile a model."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from tpcompile.cli.compiling import check_runnable, compile_model
from tpcompile.errors import UsageError


def test_ranks_on_gpus_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["generate", "me/mine", "--tp", "2", "--device", "cuda", "--prompt", "a b"]
    args = Namespace(model="me/mine", tp=2, device="cuda", words=words)
    with pytest.raises(UsageError, match="each of the 2 ranks needs a process") as caught:
        compile_model(args, lambda text: None)
    command = "torchrun --nproc-per-node 2 -m tpcompile generate me/mine --tp 2 --device cuda"
    assert str(caught.value).endswith(f"Run: {command} --prompt 'a b'.")


def test_a_preset_has_no_weights() -> None:
    check_runnable(Namespace(model="preset:tiny-qwen3", random_weights=0))
    with pytest.raises(UsageError, match="--random-weights SEED"):
        check_runnable(Namespace(model="preset:tiny-qwen3", random_weights=None))
