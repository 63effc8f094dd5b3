"""Models of GGUF files, from their bytes to logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once as capture
from tests.gguf_files import check_configuration, model_of, write_gguf
from tests.logits import IDS, check_logits, in_turn
from tests.models import TOLERANCE, relative_error
from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.frontend.gguf_config import gguf_config
from tpcompile.frontend.source import config_of
from tpcompile.inspect.plan import plan_report
from tpcompile.runtime.tensor_files import GgufFiles

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "F32": ({}, {"kind": Kind.F32}),
    "F16, with biases": ({"name": "tiny-qwen2"}, {"kind": Kind.F16}),
    "BF16": ({}, {"kind": Kind.BF16}),
    "Q8_0": ({"intermediate_size": 192}, {}),
    "Q8_0, with biases": ({"name": "tiny-qwen2", "intermediate_size": 160}, {}),
    "Q8_0, untied, some in BF16": (
        {"intermediate_size": 192, "tie_word_embeddings": False},
        {"kinds": {"attn_k.weight": Kind.BF16, "1.ffn_gate.weight": Kind.F32}},
    ),
    "Q8_0, rows that are not whole blocks": ({"intermediate_size": 176}, {}),
    "Q4_0": ({"intermediate_size": 192}, {"kind": Kind.Q4_0}),
    "Q4_0, head in Q8_0": (
        {"intermediate_size": 96, "tie_word_embeddings": False},
        {"kind": Kind.Q4_0, "kinds": {"output.weight": Kind.Q8_0}},
    ),
    **{
        f"Q8_0, embedding in {kind.name}": (
            {**WIDE, "tie_word_embeddings": False},
            {"kinds": {"token_embd.weight": kind}},
        )
        for kind in (Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
    },
    **{
        kind.name: ({**WIDE, "name": name}, {"kind": kind})
        for kind, name in zip(
            (Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
            ("tiny-qwen3", "tiny-qwen2") * 3,
            strict=True,
        )
    },
    "Q4_K, some in Q6_K and Q5_0": (
        {**WIDE, "hidden_size": 320, "num_attention_heads": 10, "num_key_value_heads": 5},
        {"kind": Kind.Q5_0, "kinds": {"ffn_down.weight": Kind.Q4_K, "output.weight": Kind.Q8_0}},
    ),
    "Q8_0, several files": ({"intermediate_size": 192}, {"parts": 4}),
    **{
        f"llama, {kind.name}": ({"name": "tiny-llama", "hidden_size": 256, **more}, {"kind": kind})
        for kind, more in (
            (Kind.F32, {"attention_bias": True, "mlp_bias": True}),
            (Kind.BF16, {"num_key_value_heads": 8}),
            (Kind.Q8_0, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
            (Kind.Q4_0, {"head_dim": 32}),
            (Kind.Q4_K, {"intermediate_size": 512}),
        )
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module", params=CASES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """Return a file, and a model in fp32 with its values."""
    changes, options = CASES[request.param]
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    truth = write_gguf(path, model_of(**changes), **options)
    if options.get("parts", 1) > 1:
        path = min(path.parent.glob("*.gguf"))
    return path, truth


@pytest.mark.parametrize(("written", "backend", "tp"), in_turn(CASES), indirect=["written"])
def test_logits(written: tuple[Path, Any], backend: str, tp: int) -> None:
    path, truth = written
    check_logits(path, truth, backend, tp)


def test_bytes_in_memory(written: tuple[Path, Any]) -> None:
    """A tied head takes no memory of its own; k-quants take a byte for scales of 6 bits."""
    path, _ = written
    loaded = plan_report(capture(str(path)).graph).ranks[0].weight_bytes
    stored = sum(file.stat().st_size for file in path.parent.glob("*.gguf"))
    assert loaded <= 1.05 * stored


def test_configurations(written: tuple[Path, Any]) -> None:
    """The configuration is that of the model, also where the file says it otherwise."""
    path, truth = written
    check_configuration(path, truth, near=("rope_parameters", "rms_norm_eps"))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.bfloat16),
    ],
)
def test_the_dtype_of_the_model(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    write_gguf(tmp_path / "model.gguf", model_of(intermediate_size=64), kind)
    assert config_of(str(tmp_path / "model.gguf")).dtype == dtype
    formats = {
        str(tensor.format) for tensor in capture(str(tmp_path / "model.gguf")).tensors.values()
    }
    assert formats == ({"None", "int8:32:f16"} if kind == Kind.Q8_0 else {"None"})


def test_ranks_in_processes(tmp_path: Path) -> None:
    """Each process opens the file itself."""
    truth = write_gguf(tmp_path / "model.gguf", model_of(intermediate_size=96))
    with torch.no_grad():
        wanted = truth(IDS).logits
    with tpcompile.compile(str(tmp_path / "model.gguf"), tp=2, dtype=torch.float32) as model:
        assert relative_error(model(IDS).logits, wanted) < TOLERANCE
        with pytest.raises(UnsupportedError, match=r"tensors in blocks.*Copy the GGUF file itself"):
            model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"qwen3.expert_count": 4}, r"does not read this property.*qwen3\.expert_count"),
        ({"qwen3.rope.scaling.type": "longrope"}, r"rope\.scaling\.type='longrope'"),
        ({"qwen3.rope.dimension_count": 8}, r"rope\.dimension_count=8.*width of a head, 16"),
        ({"tokenizer.ggml.eos_token_id": 101}, "token eos is not valid.*101.*0 to 100"),
        (
            {"general.architecture": ["qwen3"]},
            "this architecture.*qwen2 or qwen3 or .*llama",
        ),
    ],
)
def test_properties_that_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(intermediate_size=64), more=more)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        tpcompile.compile(str(path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.expert_count": 8}, r"does not read this property.*llama\.expert_count"),
        (
            {"llama.attention.head_count_kv": 3},
            r"blk\.0\.attn_k\.weight must have an even.*64 rows",
        ),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn'.*Expected none"),
    ],
)
def test_properties_of_llama_that_are_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("tiny-llama", rope_parameters=LLAMA3), more=more)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        tpcompile.compile(str(path))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(7, np.float32), r"F32 of shape \[7\]. Expected F32 of shape \[8\]"),
        (np.ones(8, np.float16), r"F16 of shape \[8\]. Expected F32"),
        (np.zeros(8, np.float32), "Expected positive numbers"),
        (np.full(8, np.nan, np.float32), "Expected positive numbers"),
    ],
)
def test_rotary_factors_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: Any, message: str
) -> None:
    path = tmp_path / "model.gguf"
    monkeypatch.setattr("tests.gguf_files.rotary_factors", lambda config: factors)
    write_gguf(path, model_of("tiny-llama", rope_parameters=LLAMA3))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not valid.*" + message):
        tpcompile.compile(str(path))


def test_rotary_factors_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("tiny-qwen3", intermediate_size=64, rope_parameters=LLAMA3))
    with pytest.raises(CheckpointError, match=r"does not have: rope_freqs\.weight"):
        tpcompile.compile(str(path))


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_rotary_factors(tmp_path: Path, backend: str) -> None:
    """They stand for the scaling of Llama 3, which changes the logits."""
    truth = write_gguf(tmp_path / "model.gguf", model_of("tiny-llama", rope_parameters=LLAMA3))
    check_logits(tmp_path / "model.gguf", truth, backend, 2)
    plain = model_of("tiny-llama", rope_parameters={**LLAMA3, "rope_type": "default"})
    plain.load_state_dict(truth.state_dict())
    with torch.no_grad():
        assert relative_error(plain(IDS).logits, truth(IDS).logits) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rotary_scaling(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    key = "qwen3.rope.scaling"
    more = {f"{key}.type": kind, f"{key}.factor": 4.0, f"{key}.original_context_length": 512}
    write_gguf(path, model_of(intermediate_size=64), more=more)
    parameters = config_of(str(path)).rope_parameters
    assert parameters["rope_type"] == kind and parameters["factor"] == 4.0
    assert parameters.get("original_max_position_embeddings") == (512 if kind == "yarn" else None)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0])
def test_each_row_is_that_of_transformers(tmp_path: Path, kind: Kind) -> None:
    """Any rows of Q and K, read alone, are those that transformers makes of the whole file."""
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("tiny-llama"), kind)
    load: Any = AutoModelForCausalLM.from_pretrained
    wanted = load(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    files, columns = GgufFiles(path), slice(None)
    for part, rows in (("q_proj", 128), ("k_proj", 64)):
        name = f"model.layers.1.self_attn.{part}.weight"
        for first, last in ((0, rows), (0, 1), (7, 41), (rows - 1, rows)):
            read = files.read(name, (slice(first, last), columns)).numpy()
            values = torch.from_numpy(np.array(dequantize(read, kind)))
            assert torch.equal(values, wanted[name][first:last]), (part, first, last)


def test_kinds_that_are_refused(tmp_path: Path) -> None:
    path, kinds = tmp_path / "model.gguf", {"1.ffn_up.weight": Kind.TQ1_0}
    write_gguf(path, model_of(**WIDE), kinds=kinds)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has a kind.*number 34"):
        tpcompile.compile(str(path))


def test_a_norm_in_blocks_is_refused() -> None:
    config = model_of().config
    kinds = {"model.norm.weight": "Q8_0"}
    config.quantization_config = {"quant_method": "gguf", "kinds": kinds}
    with pytest.raises(UnsupportedError, match=r"norm\.weight.*Q8_0.*for linears and embeddings"):
        capture(config)


@pytest.mark.parametrize("kinds", [None, [], {"lm_head.weight": "Q9"}, {"lm_head.weight": 8}])
def test_a_configuration_that_names_no_kinds(kinds: Any) -> None:
    """Only files have this method; a configuration of a directory may name it too."""
    config = model_of().config
    config.quantization_config = {"quant_method": "gguf", "kinds": kinds}
    with pytest.raises(UnsupportedError, match=r"quantization_config\.kinds"):
        capture(config)


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, None),
        ({"eos_token_id": 7}, 7),
        ({"eos_token_id": 7, "eot_token_id": 5, "eom_token_id": 6}, [7, 5, 6]),
        ({"eot_token_id": 5}, 5),
        ({"eos_token_id": 7, "eot_token_id": 7}, 7),
        ({"eos_token_id": 7, "tokens": ["<|eot_id|>", "<s>", "<|eom_id|>"]}, [7, 0, 2]),
        ({"tokens": ["a"] * 101 + ["<|im_end|>"]}, None),  # the model has no such row
        ({"tokens": 5}, None),
    ],
)
def test_ends(tmp_path: Path, more: dict[str, Any], ends: Any) -> None:
    path = tmp_path / "model.gguf"
    metadata = {f"tokenizer.ggml.{word}": value for word, value in more.items()}
    write_gguf(path, model_of("tiny-llama"), more=metadata)
    config = gguf_config(str(path))
    assert config.eos_token_id == ends and config.bos_token_id is None


def test_generation_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    truth = write_gguf(path, model_of("tiny-llama"))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        free = truth.generate(IDS[:1], **options, eos_token_id=None)[0, IDS.shape[1] :].tolist()
    end, unused = free[-1], next(token for token in range(101) if token not in free)
    more = {"tokenizer.ggml.eos_token_id": unused, "tokenizer.ggml.eot_token_id": end}
    write_gguf(path, truth, more=more)
    with tpcompile.compile(str(path), dtype=torch.float32, backend="native") as model:
        assert model.generation_config.eos_token_id == [unused, end]
        tokens = model.generate(IDS[:1], **options)[0, IDS.shape[1] :].tolist()
    assert tokens == free[: free.index(end) + 1]


def test_other_architectures(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(intermediate_size=64))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\5\0\0\0\0\0\0\0qwen3", b"\5\0\0\0\0\0\0\0qwen4", 1))
    with pytest.raises(UnsupportedError, match=r"architecture.*'qwen4'.*qwen2 or qwen3 or .*llama"):
        tpcompile.compile(str(path))


def test_a_file_of_several_is_missing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", model_of(intermediate_size=64), parts=3)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    second.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the file {second.name}"):
        tpcompile.compile(str(first))


def test_parts_of_another_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", model_of(intermediate_size=64), parts=3)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.count and split\.no are 3 and 0.*3 and 1"):
        tpcompile.compile(str(first))


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", model_of(intermediate_size=64)
    write = partial(write_gguf, path, model)
    write()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.2.ffn_up.weight", 1))
    with pytest.raises(CheckpointError, match=r"layers\.(1|2)\.mlp\.up_proj\.weight"):
        tpcompile.compile(str(path))


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16])
def test_tokens_of_hugging_face(tmp_path: Path, kind: Kind, name: str) -> None:
    """Transformers reads the same file; it takes heads of Qwen3 to be 128 wide."""
    changes = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    changes |= {"intermediate_size": 64, "tie_word_embeddings": False}
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(name, **changes), kind)
    load: Any = AutoModelForCausalLM.from_pretrained
    eager = load(tmp_path, gguf_file=path.name, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        wanted, logits = eager.generate(IDS[:1], **options), eager(IDS).logits
    with tpcompile.compile(str(path), dtype=torch.float32, backend="native") as model:
        assert relative_error(model(IDS).logits, logits) < TOLERANCE
        assert torch.equal(model.generate(IDS[:1], **options), wanted)
