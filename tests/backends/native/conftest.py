"""Every vector path that has kernels for many tokens."""

from __future__ import annotations

import pytest
import torch

from tpcompile.backends.native import many
from tpcompile.backends.native.build import paths


@pytest.fixture(params=[path for path in paths() if path in many.PATHS])
def every_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose each path of this CPU in turn."""
    monkeypatch.setattr(many, "_path", lambda: request.param)
    torch.manual_seed(0)
