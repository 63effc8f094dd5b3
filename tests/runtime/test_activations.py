"""Models with other activations than SiLU, gated or not, agree with Hugging Face eager."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig

import tpcompile
from tests.captures import captured_once
from tests.models import TOLERANCE, Pair, batch, eager_logits, relative_error, run, stage_logits
from tests.runtime.eager_pair import enlivened
from tests.stages import stages_of
from tpcompile.backends.torch_tp import emit_sources, load_rank, run_simulated
from tpcompile.comm import SimulatedGroup
from tpcompile.compare.model import compare_with_eager
from tpcompile.compare.program import compare_program
from tpcompile.compare.program.case import Batch
from tpcompile.inspect.plan import plan_report
from tpcompile.ir.checker import check_graph
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import Parameter, parameter_of, placement_of, set_parameter
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.simulate import materialise, rank_inputs
from tpcompile.ir.types import PARTIAL
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import mlp_blocks, output_of, weight_of
from tpcompile.runtime.weights import ModelWeights
from tpcompile.vm.lowering.leftovers import verify_nothing_left

aten = torch.ops.aten

LENGTHS = (3, 1, 4)
FFN = 40
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

MODELS = [
    *[("llama", act) for act in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")],
    ("qwen3", "gelu"),
    ("arcee", "relu2"),  # not gated
]
MORE = [
    *[("llama", act) for act in ("gelu_fast", "gelu_accurate", "gelu_python_tanh", "relu2")],
    *[(name, act) for name in ("qwen2", "mistral") for act in ("gelu", "relu")],
    ("qwen3", "relu"),
    *[("arcee", act) for act in ("gelu", "gelu_new", "silu")],
    *[("llama", act) for act in ("tanh", "sigmoid", "quick_gelu")],
]
SLOW = pytest.mark.slow


def config_of(model: str, activation: str) -> Any:
    return AutoConfig.for_model(model, **SMALL, hidden_act=activation)


@lru_cache
def small(model: str, activation: str) -> Pair:
    """Return a model with spread-out weights, so that activations give different logits."""
    eager = enlivened(config_of(model, activation))
    read: Any = ModelWeights(eager)
    return Pair(captured_once(eager), eager, read)


def sharded(model: str, activation: str, tp: int, last: str = "cache-kv") -> fx.GraphModule:
    passes = default_pipeline(tp)
    names = [current.name for current in passes]
    captured = small(model, activation).captured
    return run_passes(captured.graph, passes[: names.index(last) + 1])[0]


@pytest.mark.parametrize(
    ("model", "activation"), [*MODELS, *(pytest.param(*more, marks=SLOW) for more in MORE)]
)
def test_logits_are_eager_s_for_any_tp(model: str, activation: str) -> None:
    pair = small(model, activation)
    expected = eager_logits(pair.eager, LENGTHS)
    for tp in (1, 2, 3):
        stages = stages_of(pair, default_pipeline(tp))
        gm = stages[-1].graph
        logits = stage_logits(gm, pair, batch(LENGTHS, SMALL["vocab_size"]))
        assert relative_error(logits, expected) < TOLERANCE
        matches = {stage.name: stage.stats.matches for stage in stages}
        assert matches["fuse-gate-up"] == (0 if model == "arcee" else 2)
        shares = [rank.ffn for rank in plan_report(gm).ranks]
        assert sum(shares) == FFN and max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("model", "activation"), [("llama", "gelu"), pytest.param("arcee", "relu2", marks=SLOW)]
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16])
def test_every_value_and_decode_step_is_eager_s(
    model: str, activation: str, dtype: torch.dtype
) -> None:
    """All values agree with eager, in bf16 relative to fp32, for distinguishable activations."""
    eager = enlivened(config_of(model, activation), dtype)
    comparison = compare_with_eager(eager, default_pipeline(3), simulate=True)
    assert comparison.ok, comparison.table()


@pytest.mark.parametrize(
    ("model", "activation", "backend"), [("qwen3", "gelu", "native"), ("llama", "tanh", "torch")]
)
def test_generated_tokens_are_eager_s(model: str, activation: str, backend: str) -> None:
    """Steps run on a program by default, unless programs do not support the activation."""
    eager = enlivened(config_of(model, activation))
    ids = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False}
    refused = pytest.warns(UserWarning, match="programs support only silu, gelu, gelu_tanh, relu")
    with refused if backend == "torch" else nullcontext():
        compiled = tpcompile.compile(eager, tp=2, simulate=True)
    with compiled:
        assert compiled.backend == backend
        assert compiled.generate(ids, **options).tolist() == eager.generate(ids, **options).tolist()
        assert compiled.steps.program == (5 if backend == "native" else 0)


@pytest.mark.parametrize(
    ("model", "activation"),
    [
        *[("llama", act) for act in ("gelu", "gelu_pytorch_tanh", "relu")],
        *[("arcee", act) for act in ("relu2", "silu")],
        pytest.param("llama", "relu2", marks=SLOW),
    ],
)
def test_eager_the_graph_and_a_program_agree(model: str, activation: str) -> None:
    """All values agree, on the reference machine and natively, also that of the activation."""
    eager = enlivened(config_of(model, activation))
    comparison = compare_program(eager, decode_pipeline(2), Batch((3, 1)), backend="native")
    assert comparison.ok, comparison.table()
    assert "activated" in {row.node for row in comparison.rows}


@pytest.mark.parametrize(("model", "activation"), [("llama", "gelu_new"), ("arcee", "relu2")])
def test_emitted_modules_give_the_bits_of_the_graph(model: str, activation: str) -> None:
    pair = small(model, activation)
    gm = sharded(model, activation, 3)
    packed = batch(LENGTHS, SMALL["vocab_size"])
    weights = materialise(gm, pair.read)
    group = SimulatedGroup(3)
    sources = emit_sources(gm)
    modules = [
        load_rank(
            source,
            rank,
            {name: parts[rank] for name, parts in weights.items()},
            pair.captured.rotary.fresh(),
            group.rank(rank),
        )
        for rank, source in enumerate(sources)
    ]
    expected = run(gm, pair, packed)[output_of(gm.graph)]
    results = run_simulated(modules, group, rank_inputs(gm, packed.inputs()))
    for rank, output in enumerate(results):
        assert torch.equal(output, expected[rank][0])


def test_the_source_names_the_activation() -> None:
    source = emit_sources(sharded("llama", "gelu_pytorch_tanh", 2))[0]
    assert "tpc.gelu(gate_proj, approximate='tanh')" in source
    assert "F.relu(" in emit_sources(sharded("arcee", "relu2", 2))[0]


OTHERS = {"gelu": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "relu"}


@pytest.mark.parametrize("activation", OTHERS)
def test_another_activation_gives_other_logits(activation: str) -> None:
    """Other activations change the logits, so the tests above can detect a wrong one."""
    logits, other_logits = (
        eager_logits(small("llama", name).eager, LENGTHS)
        for name in (activation, OTHERS[activation])
    )
    assert relative_error(logits, other_logits) > 10 * TOLERANCE


def test_a_term_of_a_sum_into_an_activation_is_an_error() -> None:
    gm = sharded("llama", "gelu", 2, "insert-collectives")
    first, *_ = calls(gm, aten.gelu.default)
    term = next(n for n in gm.graph.nodes if n.target is LINEAR and placement_of(n) == PARTIAL)
    first.args = (term,)
    assert "partial-nonlinear" in {problem.rule for problem in check_graph(gm)}


def test_up_with_another_layout_than_the_gate_is_an_error() -> None:
    gm = sharded("llama", "gelu", 2, "insert-collectives")
    weight = weight_of(mlp_blocks(gm.graph)[0].up)
    whole = parameter_of(weight)
    replicated = Parameter.replicated(whole.whole, whole.type.dtype, 2)
    swapped = Layout("ffn", FFN, 1, (((20, 40),), ((0, 20),)))
    set_parameter(weight, replicated.sharded(0, swapped))
    assert "same-layout" in {problem.rule for problem in check_graph(gm)}


@pytest.mark.parametrize("activation", ["tanh", pytest.param("gelu_new", marks=SLOW)])
def test_programs_refuse_another_activation_by_name(activation: str) -> None:
    refusal = "the MLP's activation is aten.tanh; programs support only silu"
    eager = enlivened(config_of("llama", activation))
    with pytest.raises(tpcompile.UnsupportedError, match=refusal):
        verify_nothing_left(run_passes(captured_once(eager).graph, decode_pipeline(2))[0])
    with pytest.raises(tpcompile.UnsupportedError, match=refusal):
        compare_program(eager, decode_pipeline(2), Batch((3, 1)))


@pytest.mark.parametrize("activation", ["mish", pytest.param("leaky_relu", marks=SLOW)])
def test_an_unknown_activation_is_refused_by_name(activation: str) -> None:
    message = rf"computes aten.{activation}, .* At \S+\.act_fn "
    with pytest.raises(tpcompile.UnsupportedError, match=message):
        tpcompile.capture(config_of("llama", activation))
