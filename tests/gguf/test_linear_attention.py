"""Models with linear attention in GGUF files, from their bytes to logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig

import tpcompile
from tests.gguf_files import check_configuration, write_gguf
from tests.hybrids import lively_hybrid
from tests.logits import check_logits, in_turn
from tests.runtime.eager_pair import listening
from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.frontend.source import config_of
from tpcompile.gguf import GgufFile
from tpcompile.gguf.linear_attention import rotation
from tpcompile.gguf.metadata import Metadata
from tpcompile.presets import preset
from tpcompile.runtime.tensor_files import GgufFiles

SAME = {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
TWICE = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
THREE = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
BLOCKS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""Heads of whole blocks of 32 columns."""
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Rows of whole superblocks of 256 columns."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "F32": (SAME, {"kind": Kind.F32}),
    "F32, 2 value heads of a key head": (TWICE, {"kind": Kind.F32}),
    "BF16, 3 value heads of a key head": ({**THREE, **BLOCKS}, {"kind": Kind.BF16}),
    "Q8_0": ({**SAME, **BLOCKS}, {}),
    "Q8_0, 3 value heads of a key head": ({**THREE, **BLOCKS}, {}),
    "Q4_0, untied, 2 value heads of a key head": (
        {**TWICE, **BLOCKS, "tie_word_embeddings": False},
        {
            "kind": Kind.Q4_0,
            "kinds": {
                "output.weight": Kind.Q8_0,
                "ssm_alpha.weight": Kind.F32,
                "ssm_beta.weight": Kind.F32,
            },
        },
    ),
    "Q4_K, some in Q6_K and Q8_0": (
        {**SAME, **WIDE, "linear_value_head_dim": 256},
        {
            "kind": Kind.Q4_K,
            "kinds": {
                "ffn_down.weight": Kind.Q6_K,
                "attn_v.weight": Kind.Q6_K,
                "ssm_alpha.weight": Kind.Q8_0,
                "ssm_beta.weight": Kind.Q8_0,
            },
        },
    ),
    "Q4_K_M: channels in Q5_K": (
        {**SAME, **WIDE, "linear_value_head_dim": 256},
        {"kind": Kind.Q4_K, "kinds": {"attn_qkv.weight": Kind.Q5_K}},
    ),
    "Q5_K_M: channels in Q6_K, 3 value heads of a key head": (
        {**THREE, **WIDE, "linear_value_head_dim": 256},
        {"kind": Kind.Q5_K, "kinds": {"attn_qkv.weight": Kind.Q6_K}},
    ),
    "Q4_K, superblocks of whole value heads": (
        {**THREE, **WIDE, "linear_value_head_dim": 256},
        {"kind": Kind.Q4_K},
    ),
}


def model_of(**changes: Any) -> Any:
    """Return a model with random weights, of which every layer changes the logits."""
    settings = {"vocab_size": 101, "num_hidden_layers": 4, "full_attention_interval": 2}
    settings["intermediate_size"] = 192
    return lively_hybrid(AutoConfig.for_model(**{**preset("tiny-qwen3.5"), **settings, **changes}))


@pytest.fixture(scope="module", params=CASES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """Return a file, and a model in fp32 with its values."""
    changes, options = CASES[request.param]
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return path, write_gguf(path, model_of(**changes), **options)


@pytest.mark.parametrize(("written", "backend", "tp"), in_turn(CASES), indirect=["written"])
def test_logits(written: tuple[Path, Any], backend: str, tp: int) -> None:
    path, truth = written
    check_logits(path, truth, backend, tp)


def test_configurations(written: tuple[Path, Any]) -> None:
    path, truth = written
    check_configuration(path, truth, near=("rms_norm_eps",))


@pytest.mark.parametrize("heads", [SAME, THREE])
def test_values_that_are_made(tmp_path: Path, heads: dict[str, int]) -> None:
    """Vectors and taps are those of the model, but for the rounding of fp32; any part is read."""
    model = model_of(**heads)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_gguf(tmp_path / "model.gguf", model, Kind.F32)
    with GgufFiles(tmp_path / "model.gguf") as files:
        for name, tensor in wanted.items():
            if tensor.dim() != 1 and "conv1d" not in name:
                continue
            whole = tuple(slice(0, extent) for extent in tensor.shape)
            value = files.read(name, whole)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, tensor, rtol=1e-6, atol=1e-7)
            part = (slice(1, 3), *whole[1:])
            assert torch.equal(files.read(name, part), value[part])


@pytest.mark.parametrize("width", [44, 94, 128, 256])
def test_parts_of_heads(width: int) -> None:
    """Transformers computes each even number of columns from the share of a head."""
    for rotated in range(2, width + 1, 2):
        properties = {"qwen35.rope.dimension_count": rotated}
        metadata = Metadata(GgufFile(Path("model.gguf"), properties, {}, {}), "qwen35")
        assert int(width * rotation(metadata, width)["partial_rotary_factor"]) == rotated


def test_layers_that_the_file_names(tmp_path: Path) -> None:
    """An array of the kinds of layers is read before the interval."""
    model = model_of(**TWICE, num_hidden_layers=3)
    linear = [layer_type == "linear_attention" for layer_type in model.config.layer_types]
    more = {"qwen35.attention.recurrent_layers": linear}
    interval = "full_attention_interval"
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, model, Kind.F32, more={**more, f"qwen35.{interval}": 3})
    assert config_of(str(path)).layer_types == model.config.layer_types
    check_logits(path, truth, "torch", 2)


def test_blocks_that_predict_further_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left on disk, in any kind, as `mtp.*` of checkpoints are."""
    path, model = tmp_path / "model.gguf", model_of(**SAME)
    tensors = {
        "blk.4.attn_q.weight": (np.zeros((8, 34), np.uint8), Kind.Q8_0),
        "blk.4.attn_norm.weight": (np.ones(64, np.float16), Kind.F16),
        "blk.4.nextn.eh_proj.weight": (np.ones((64, 128), np.float32), Kind.F32),
    }
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    truth = write_gguf(path, model, more=more, tensors=tensors)
    logger = logging.getLogger("tpcompile.frontend.gguf_config")
    monkeypatch.setattr(logger, "level", logging.INFO)
    with listening() as heard:
        check_logits(path, truth, "torch", 2)
    assert "3 tensors that predict further tokens are not read" in heard


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ssm.group_count": 4}, "ssm.time_step_rank=6. Expected a multiple of 4, the key heads"),
        ({"ssm.group_count": 0}, "ssm.group_count=0. Expected a positive integer"),
        ({"ssm.inner_size": 100}, "ssm.inner_size=100. Expected a multiple of 6, the value heads"),
        ({"ssm.state_size": 4096}, r"ssm_conv1d\.weight must have whole value heads.*\[192, 4\]"),
        ({"ssm.inner_size": 90}, r"linear_attn\..* does not match the configuration"),
        ({"ssm.state_size": 14}, r"linear_attn\..* does not match the configuration"),
        ({"ssm.conv_kernel": 3}, r"conv1d\.weight does not match the configuration"),
        ({"full_attention_interval": [2]}, r"full_attention_interval=\[2\]. Expected a positive"),
        ({"full_attention_interval": 3}, r"lacks the tensor model\.layers\.\d\."),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers=.True.. Expected one for each"),
        ({"attention.recurrent_layers": [1, 0] * 2}, "recurrent_layers=.*an array of bool"),
        ({"rope.dimension_count": 18}, "dimension_count=18. Expected an even number up to.* 16"),
        ({"rope.dimension_count": 3}, "dimension_count=3. Expected an even number up to.* 16"),
        ({"rope.dimension_sections": [1, 1]}, r"dimension_sections=\[1, 1\]. Expected three"),
        ({"rope.dimension_sections": [1, 1, 1, 1]}, "dimension_sections=.*. Expected three"),
        ({"rope.dimension_sections": [1, -1, 1]}, "dimension_sections=.*. Expected three"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers=4. Expected less than 4"),
        ({"nextn_predict_layers": "1"}, "nextn_predict_layers='1'. Expected 0 or a positive"),
        ({"ssm.v_head_reordered": True}, r"does not read this property.*ssm\.v_head_reordered"),
    ],
)
def test_properties_that_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    metadata = {f"qwen35.{word}": value for word, value in more.items()}
    write_gguf(path, model_of(**TWICE), Kind.F32, more=metadata)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        tpcompile.compile(str(path), backend="torch")


def test_superblocks_of_several_value_heads(tmp_path: Path) -> None:
    """Their columns cannot be moved without loss; other tensors may be in superblocks."""
    path = tmp_path / "model.gguf"
    model = model_of(**TWICE, **WIDE, linear_value_head_dim=128)
    write_gguf(path, model, Kind.Q4_K)
    error = r"blk\.0\.ssm_out\.weight cannot be read.*256 columns \(Q4_K\), and 128 .*Hugging Face"
    with pytest.raises(UnsupportedError, match=error):
        tpcompile.compile(str(path))
    truth = write_gguf(path, model, Kind.Q4_K, kinds={"ssm_out.weight": Kind.Q8_0})
    check_logits(path, truth, "torch", 2)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("blk.1.ssm_a", np.zeros(3, np.float32), "layers.1.linear_attn.A_log.*0.0.*negative"),
        ("blk.1.ssm_a", np.ones(3, np.float32), "layers.1.linear_attn.A_log.*1.0.*negative"),
        ("output_norm.weight", np.full(64, np.inf, np.float32), "norm.weight.*inf.*finite"),
        ("output_norm.weight", np.ones(64, np.float16), "output_norm.weight must be in fp32.*F16"),
    ],
)
def test_values_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: Any, message: str
) -> None:
    path, add = tmp_path / "model.gguf", gguf.GGUFWriter.add_tensor

    def other(writer: Any, tensor_name: str, stored: Any, raw_dtype: Any) -> None:
        add(writer, tensor_name, *((data,) if tensor_name == name else (stored, None, raw_dtype)))

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", other)
    write_gguf(path, model_of(**SAME, full_attention_interval=4), Kind.F32)
    with pytest.raises(CheckpointError, match=message):
        tpcompile.compile(str(path), backend="torch")
