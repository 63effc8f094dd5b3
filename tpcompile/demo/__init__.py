"""The demo model: a tiny Qwen3 that is trained on the spot on a generated text."""

from tpcompile.demo.model import make_demo

__all__ = ["make_demo"]
