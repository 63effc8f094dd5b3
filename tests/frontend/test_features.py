"""Refusals of unsupported features name the class, the feature and the supported alternatives."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, ModernBertConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.captures import captured_once
from tests.causal_lms import KINDS, tiny_config, tiny_model
from tests.models import TOLERANCE, relative_error
from tpcompile import compile as compiled
from tpcompile.errors import CaptureError, CompileError, UnsupportedError
from tpcompile.frontend import capture
from tpcompile.frontend.features import refuse_features
from tpcompile.frontend.layers import find_layers
from tpcompile.frontend.masks import Mask
from tpcompile.frontend.shell import _attention
from tpcompile.passes import default_pipeline, run_passes

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")

REFUSED: dict[str, tuple[str, str]] = {
    **{
        kind: (f"{name}ForCausalLM has a router of another form", "a softmax over all experts")
        for kind, name in {
            "mixtral": "Mixtral",
            "granitemoe": "GraniteMoe",
            "afmoe": "Afmoe",
            "ernie4_5_moe": "Ernie4_5_Moe",
            "phimoe": "Phimoe",
        }.items()
    },
    "aria_text": (
        "AriaTextForCausalLM has experts with transposed weights",
        "SwiGLU MLPs without biases",
    ),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLForCausalLM has experts with a gate of another form",
        "SwiGLU MLPs without biases",
    ),
    "nemotron_h": (
        "NemotronHForCausalLM has .*experts without a gate",
        "SwiGLU MLPs without biases",
    ),
    "jetmoe": (
        "JetMoeForCausalLM has a mixture of 4 experts without Hugging Face's interface",
        "SwiGLU MLPs without biases",
    ),
    "dbrx": ("DbrxForCausalLM branches on values that it computes", "the same operations"),
    "gemma3_text": ("Gemma3ForCausalLM has a rotary table per layer type", "one rotary table"),
    "olmo3": ("Olmo3ForCausalLM has a rotary table per layer type", "one rotary table"),
    "granite_swa": ("GraniteSWAForCausalLM has 2 rotary modules", "one rotary table"),
    "llama4_text": ("Llama4ForCausalLM has .*rotary tables of complex numbers", "real cos and sin"),
    "gpt_oss": ("GptOssForCausalLM has rotary tables of half the rotated width", "as wide as"),
    "deepseek_v3": (
        r"DeepseekV3ForCausalLM has heads of two widths \(16 for queries and keys, 8 for values\)",
        "heads of one width",
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM normalises heads after it rotates them",
        "a norm before the rotation",
    ),
    "stablelm": ("StableLmAttention gets no keyword arguments from its layer", "pass"),
    "olmo2": ("Olmo2ForCausalLM normalises all heads together", "per head"),
    "falcon_h1": ("FalconH1ForCausalLM has layers of kind hybrid", "full_attention"),
    "minimax": (
        "MiniMaxForCausalLM has layers of kind linear_attention other than Qwen3.5's",
        "gated delta nets with one convolution for queries, keys and values",
    ),
    "gpt2": ("GPT2LMHeadModel has no rotary position embedding", "rotates its heads by position"),
    "bart": ("BartForCausalLM has .*attention that is not causal", "to earlier tokens only"),
    "gemma": ("GemmaForCausalLM reads the buffer", "parameters only"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_true_reason(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    if kind not in KINDS:
        pytest.skip(f"this version of Hugging Face has no {kind}")
    model = tiny_model(tiny_config(kind), on_meta=True)
    capfd.readouterr()
    with pytest.raises(CompileError) as refused:
        run_passes(captured_once(model).graph, default_pipeline(2))
    feature, supported = REFUSED[kind]
    assert re.match(feature, str(refused.value))
    assert re.search(f"Expected .*{supported}", str(refused.value))
    assert capfd.readouterr() == ("", "")


def test_all_features_are_named_at_once() -> None:
    model = tiny_model(tiny_config("gpt_oss"), on_meta=True)
    with pytest.raises(UnsupportedError) as refused:
        refuse_features(model)
    text = str(refused.value)
    assert text.index("half the rotated width") < text.index(" and experts with interleaved rows")
    assert "wide as the rotated heads, experts that are SwiGLU MLPs" in text


def _llama(**changes: Any) -> Any:
    return tiny_model(tiny_config("llama", **changes))


@pytest.mark.parametrize(
    ("setting", "value", "feature"),
    [
        ("has_gate", False, "without a gate"),
        ("is_concatenated", False, "with interleaved rows of gate and up"),
        ("is_transposed", True, "with transposed weights"),
        ("has_bias", True, "with biases"),
        ("has_post_expert_norm", True, "with a norm of their results"),
        ("act_fn", nn.GELU(), "that apply GELU"),
    ],
)
def test_other_experts_are_refused(setting: str, value: Any, feature: str) -> None:
    model = tiny_model(tiny_config("qwen3_moe"), on_meta=True)
    refuse_features(model)
    setattr(model.model.layers[1].mlp.experts, setting, value)
    message = rf"has experts {feature} \(model\.layers\.1\.mlp\.experts\)"
    with pytest.raises(UnsupportedError, match=message):
        refuse_features(model)


def test_listed_experts_are_found_and_are_not_the_layers() -> None:
    model = _llama()
    mlp = model.model.layers[1].mlp
    mlp.router = nn.Linear(32, 7, bias=False)
    mlp.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(7))
    assert find_layers(model).path == "model.layers"
    with pytest.raises(UnsupportedError, match="has a mixture of 7 experts"):
        capture(model)


def test_a_list_without_a_router_is_no_mixture() -> None:
    model = _llama()
    model.model.layers[0].mlp.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    refuse_features(model)


def test_layers_left_out() -> None:
    model = _llama(num_hidden_layers=3)
    model.config.num_hidden_layers = 2
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM does not call layer 2") as refused:
        capture(model)
    assert "calls to 2 of its 3 layers" in str(refused.value)


def test_one_layer_in_two_places() -> None:
    model = _llama(num_hidden_layers=3)
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has one module in several places"):
        capture(model)


@pytest.mark.skipif("qwen3_5_text" not in KINDS, reason="needs Qwen3.5")
def test_linear_attention_alone_is_refused() -> None:
    """The lengths of sequences, which states need too, come with the KV cache of attention."""
    model = tiny_model(tiny_config("qwen3_5_text", layer_types=["linear_attention"] * 2))
    message = "^Qwen3_5ForCausalLM has linear attention in all of its layers. Expected at least one"
    with pytest.raises(UnsupportedError, match=message):
        capture(model)


class _OwnAttention(LlamaAttention):
    """Attention whose forward does not look its function up."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return self.o_proj(self.q_proj(hidden_states)), None


def test_attention_that_looks_its_function_up_can_be_replaced() -> None:
    """Qwen3.5 declares no support of other attention functions, but uses the interface."""
    model = _llama()
    model._supports_attention_backend = False
    refuse_features(model)


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    model = _llama()
    model._supports_attention_backend = False
    for layer in model.model.layers:
        layer.self_attn.__class__ = _OwnAttention
    error = "LlamaForCausalLM has no attention that goes through Hugging Face's attention interface"
    with pytest.raises(UnsupportedError, match=error):
        capture(model)


def test_bidirectional_attention_is_refused() -> None:
    """Bidirectional attention shows only in the configuration; Hugging Face then masks nothing."""
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM is an encoder: is_causal=False"):
        capture(_llama(is_causal=False))


def test_value_heads_of_another_width_are_refused_where_they_are_traced() -> None:
    query, value = torch.zeros(1, 2, 3, 6), torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=r"two widths \(6 for .*, 4 for values\)"):
        _attention(nn.Module(), query, query, value, Mask(torch.ones, custom=False, sizes=()))


class _Records(logging.Handler):
    """Log handler that collects torch's records; torch's own one has an early copy of stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_an_error_while_tracing_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """An error while tracing is reported once, without the traceback that fake tensors log."""
    model = _llama()
    model.model.layers[0].mlp.down_proj = nn.Linear(47, 32, bias=False)
    capfd.readouterr()
    records = _Records()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(records)
    try:
        with pytest.raises(CaptureError, match="LlamaForCausalLM could not be traced"):
            capture(model)
    finally:
        logger.removeHandler(records)
    assert capfd.readouterr() == ("", "")
    assert not records.said


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("config", [BertConfig(**SMALL), ModernBertConfig(**SMALL)], ids=str)
@pytest.mark.parametrize("loader", [AutoModel, AutoModelForMaskedLM])
def test_encoders(config: Any, loader: Any) -> None:
    with torch.device("meta"):
        model = loader.from_config(config).eval()
    with pytest.raises(UnsupportedError, match=f"{type(model).__name__} is an encoder"):
        capture(model)


class _Unknown(nn.Module):
    """A module that is not a Hugging Face model."""


@pytest.mark.parametrize("module", [_Unknown(), nn.Linear(2, 2), nn.ModuleList()], ids=str)
def test_unknown_classes(module: nn.Module) -> None:
    name = type(module).__name__
    with pytest.raises(UnsupportedError, match=f"{name} is not a Hugging Face model") as refused:
        capture(module)
    assert "PreTrainedModel" in str(refused.value)


def test_a_head_for_classes_of_texts() -> None:
    from transformers import LlamaForSequenceClassification

    with torch.device("meta"):
        model = LlamaForSequenceClassification(tiny_config("llama")).eval()
    with pytest.raises(UnsupportedError, match="has no language-model head"):
        capture(model)


def _with_lora(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    return peft.get_peft_model(model, config).eval()


def test_unmerged_adapters_are_refused_with_what_to_do() -> None:
    adapted = _with_lora(_llama())
    for model in (adapted, adapted.get_base_model()):
        with pytest.raises(UnsupportedError, match="has unmerged adapters") as refused:
            capture(model)
        assert str(refused.value).startswith(type(model).__name__)
        assert "merge_and_unload()" in str(refused.value)


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter"])
def test_merged_adapters_compile(how: str) -> None:
    adapted = _with_lora(_llama())
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    model = getattr(adapted, how)() or adapted
    with torch.inference_mode():
        expected = model(ids).logits
    with compiled(model, tp=2, simulate=True) as sharded:
        assert relative_error(sharded(ids).logits, expected) < TOLERANCE


def test_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(_llama(), config).eval()
    with pytest.raises(UnsupportedError, match="has virtual tokens of a prompt adapter"):
        capture(model)
