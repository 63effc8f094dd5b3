"""Files in the format GGUF: their metadata, and where their tensors are."""

from __future__ import annotations

from tpcompile.gguf.file import GgufFile, GgufTensor, is_gguf, open_gguf
from tpcompile.gguf.kinds import GgufKind

__all__ = ["GgufFile", "GgufKind", "GgufTensor", "is_gguf", "open_gguf"]
