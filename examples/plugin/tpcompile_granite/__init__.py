"""A plugin of tpcompile for Granite models, which scale their embeddings and logits.

Importing the package registers what its modules declare. tpcompile imports it by the entry point
that `pyproject.toml` names.
"""

from tpcompile_granite import backend, instruction, ops, passes, policy, target

__all__ = ["backend", "instruction", "ops", "passes", "policy", "target"]
