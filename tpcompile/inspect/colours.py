"""The colour of each kind of instruction, the same in every picture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from zlib import crc32

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        # The Tol "light" palette and two more: safe for colour-blind readers, and black text stays
        # legible on it. Kinds that do the same work in different ways have similar hues.
        "embed": "#dddddd",
        "norm_qkv_rope_append": "#77aadd",
        "norm_qkv_rows": "#99ddff",
        "partial_attention": "#eedd88",
        "attention_reduce": "#aaaa00",
        "linear_residual": "#ee8866",
        "linear_terms": "#ffaabb",
        "all_reduce": "#c8a27c",
        "norm_gate_up_swiglu": "#44bb99",
        "norm_lm_head": "#bbcc33",
        "argmax": "#c3a5e6",
        "norm_up_activation": "#88cc88",
        "norm_gate": "#55eecc",
        "norm_gated_up": "#66aa55",
        "norm_rows": "#5a96f0",
        "delta_step": "#e196a5",
        "top_experts": "#40f040",
        "norm_experts": "#a09040",
        "expert_terms": "#f050c0",
        "shared_terms": "#90f050",
    }
)
"""The colours by kind, in the order of opcodes."""

OTHERS = ("#9098a0", "#f490f0", "#a8f0a0", "#fff0c0")
"""The colours of kinds from other packages."""


def colour_of(kind: str) -> str:
    """Return the colour of a kind. That of an unknown kind depends on its name alone."""
    return COLOURS.get(kind) or OTHERS[crc32(kind.encode()) % len(OTHERS)]
