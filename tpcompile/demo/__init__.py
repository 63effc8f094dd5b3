"""The demo model: a tiny Qwen3 or Qwen3.5, trained on the spot on generated text."""

from tpcompile.demo.model import make_demo

__all__ = ["make_demo"]
