"""Tests of `tpcompile.compile` and its refusals."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import tpcompile
from tests.models import TOLERANCE, padded, preset_pair, relative_error
from tpcompile.options import dtype_of
from tpcompile.passes import default_pipeline
from tpcompile.runtime.kv.packing import pack
from tpcompile.runtime.ranks import start

pytestmark = pytest.mark.usefixtures("captured_once", "forked_launchers")


def _compiled(**options: Any) -> tpcompile.CompiledModel:
    return tpcompile.compile("preset:tiny-qwen3", random_weights=0, simulate=True, **options)


def test_a_preset_with_random_weights() -> None:
    pair = preset_pair("tiny-qwen3")
    ids, mask = padded((5, 9), vocabulary=1013)
    with _compiled(tp=3) as model:
        logits = model(ids, attention_mask=mask).logits
    with torch.inference_mode():
        expected = pair.eager(ids, attention_mask=mask).logits
    assert logits.shape == expected.shape
    assert relative_error(logits[mask.bool()], expected[mask.bool()]) < TOLERANCE
    assert not logits[~mask.bool()].any()


def test_a_model_in_memory_and_positions() -> None:
    eager = preset_pair("tiny-qwen2").eager
    ids = torch.randint(1013, (1, 7))
    positions = torch.arange(3, 10)[None]
    with tpcompile.compile(eager, tp=2, simulate=True) as model:
        logits = model(ids, position_ids=positions, logits_to_keep=2).logits
    with torch.inference_mode():
        expected = eager(ids, position_ids=positions, logits_to_keep=2).logits
    assert logits.shape == (1, 2, 1013)
    assert relative_error(logits, expected) < TOLERANCE


def test_dtype() -> None:
    with _compiled(tp=2, dtype="bfloat16") as model:
        assert model(torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", torch.bfloat16),
        ("FP16", torch.float16),
        ("fp32", torch.float32),
        ("Float32", torch.float32),
        ("auto", None),
        (None, None),
        (torch.float16, torch.float16),
    ],
)
def test_names_of_dtypes(name: Any, expected: torch.dtype | None) -> None:
    assert dtype_of(name) == expected


def test_stages_plan_and_source() -> None:
    with _compiled(tp=2) as model:
        assert model.stages[0].name == "capture"
        assert "Shard(1, kv_heads)" in model.stages[-1].text()
        assert [stage.name for stage in model.stages[-2:]] == ["cache-kv", "keep-states"]
        assert model.stages[-2].stats.matches == model.config.num_hidden_layers
        assert model.plan.to_json()["ranks"][1]["q_heads"] == 3
        assert "class Rank1(" in model.source(1)
        assert "def megakernel(" not in model.source(1)
        with pytest.raises(tpcompile.UsageError, match="0 to 1"):
            model.source(2)


def test_the_source_of_the_kernel_follows_that_of_the_module() -> None:
    with _compiled(tp=2, backend="triton", max_seq_len=32) as model:
        source = model.source(1)
        assert source.index("class Rank1(") < source.index("def megakernel(")
        compile(source, "source.py", "exec")


def test_gather_weight() -> None:
    pair = preset_pair("tiny-qwen3")
    with _compiled(tp=4) as model:
        for name in (*pair.captured.tensors, *pair.captured.aliases):
            expected = pair.eager.get_parameter(name)
            assert torch.equal(model.gather_weight(name), expected), name
        with pytest.raises(tpcompile.UsageError, match="Did you mean"):
            model.gather_weight("model.layers.0.mlp.up_proj.wight")


def test_a_pipeline_of_ones_own() -> None:
    """A pipeline without fusions and with replicated KV heads gives the same numbers."""
    text = (
        "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,"
        "plan-sharding{ffn_grain=16},shard-linears,insert-collectives"
    )
    ids = torch.randint(1013, (2, 11))
    with _compiled(tp=4, pipeline=text) as model, _compiled(tp=4) as standard:
        assert [stage.name for stage in model.stages[1:3]] == ["canonicalize", "raise-norm"]
        assert relative_error(model(ids).logits, standard(ids).logits) < TOLERANCE


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tp of zero": ({"tp": 0}, tpcompile.UsageError, "tp must be a positive int, got 0"),
    "negative tp": ({"tp": -2}, tpcompile.UsageError, "tp must be a positive int, got -2"),
    "tp that is not a number": (
        {"tp": "two"},
        tpcompile.UsageError,
        "tp must be a positive int, got 'two'",
    ),
    "more ranks than heads": ({"tp": 7}, tpcompile.ShardingError, "6 query heads"),
    "unknown backend": ({"backend": "tourch"}, tpcompile.UsageError, "Did you mean torch"),
    "unknown pass": ({"pipeline": "canonicalise"}, tpcompile.UsageError, "Did you mean canon"),
    "broken pipeline": ({"pipeline": "canonicalize{"}, tpcompile.UsageError, "character 13"),
    "unknown dtype": ({"dtype": "bfloat"}, tpcompile.UsageError, "Did you mean bfloat16"),
    "dtype that is not a float": ({"dtype": "int8"}, tpcompile.UsageError, "dtype"),
    "another device": ({"device": "meta"}, tpcompile.UnsupportedError, "cpu or cuda"),
    "unknown device": (
        {"device": "cuba"},
        tpcompile.UsageError,
        "device must be cpu or cuda, got 'cuba'",
    ),
    "no length": (
        {"max_seq_len": 0},
        tpcompile.UsageError,
        "max_seq_len must be a positive int, got 0",
    ),
    "half a batch": (
        {"max_batch": 0.5},
        tpcompile.UsageError,
        r"max_batch must be a positive int, got 0\.5",
    ),
    "no backend": ({"backend": None}, tpcompile.UsageError, "no backend None"),
    "a plan for other ranks": (
        {"tp": 2, "pipeline": "canonicalize,plan-sharding{tp=3}"},
        tpcompile.UsageError,
        "plans for 3 ranks",
    ),
    "ranks without a plan": (
        {"tp": 2, "pipeline": "canonicalize"},
        tpcompile.UsageError,
        "does not shard the graph",
    ),
    "no threads": ({"threads": 0}, tpcompile.UsageError, "threads must be a positive int, got 0"),
    "true threads": (
        {"threads": True},
        tpcompile.UsageError,
        "threads must be a positive int, got True",
    ),
    "too many threads": (
        {"threads": 5000},
        tpcompile.UsageError,
        "threads must be at most 1,024, got 5,000",
    ),
    "an invalid seed": ({"random_weights": "a"}, tpcompile.UsageError, "must be an integer seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        tpcompile.compile("preset:tiny-qwen3", **{"random_weights": 0, "simulate": True, **options})


def test_no_weights() -> None:
    with pytest.raises(tpcompile.CheckpointError, match="no weights"):
        tpcompile.compile("preset:tiny-qwen3")


def test_a_cache_goes_from_call_to_call() -> None:
    ids = torch.randint(1013, (1, 8))
    with _compiled(tp=3, max_seq_len=8) as model:
        whole = model(ids, use_cache=False)
        assert whole.past_key_values is None
        cache = model(ids[:, :5]).past_key_values
        output = model(ids[:, 5:], past_key_values=cache)
        assert output.past_key_values is cache
        assert relative_error(output.logits, whole.logits[:, 5:]) < TOLERANCE
        with pytest.raises(tpcompile.UsageError, match="at most max_seq_len=8"):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(tpcompile.UsageError, match="must be a cache of this model"):
            model(ids, past_key_values=object())


def test_text_is_generated() -> None:
    ids = torch.randint(1013, (2, 4))
    with _compiled(tp=2) as model:
        tokens = model.generate(ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    expected = preset_pair("tiny-qwen3").eager.generate(
        ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0
    )
    assert tokens.tolist() == expected.tolist()


def test_ranks_are_processes_of_their_own() -> None:
    ids = torch.randint(1013, (1, 4))
    with torch.inference_mode():
        expected = preset_pair("tiny-qwen3").eager(ids).logits
    with tpcompile.compile("preset:tiny-qwen3", tp=2, random_weights=0) as model:
        pids = model._ranks.processes
        assert len({os.getpid(), *pids}) == 3
        assert relative_error(model(ids).logits, expected) < TOLERANCE
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(tpcompile.UsageError, match="closed"):
        model(ids)


def test_what_stands_before_the_ranks_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start before the model is captured, and end if the model is refused."""
    started = []
    spawned = start.SpawnedRanks

    def spied(*args: Any, **options: Any) -> Any:
        started.append(spawned(*args, **options))
        assert len(started[-1].processes) == 2
        return started[-1]

    monkeypatch.setattr(start, "SpawnedRanks", spied)
    with pytest.raises(tpcompile.CheckpointError, match="no weights"):
        tpcompile.compile("preset:tiny-qwen3", tp=2)
    assert [ranks.closed for ranks in started] != [""]
    assert not any(Path(f"/proc/{pid}").exists() for ranks in started for pid in ranks.processes)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, tpcompile; print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_errors_are_paragraphs() -> None:
    error = tpcompile.CompileError(
        "It failed", where="%x", got="this", expected="that", hint="do something. Or not?"
    )
    assert str(error) == ("It failed. At %x. Found this. Expected that. Do something. Or not?")


def test_capture_gives_the_raw_graph() -> None:
    graph = tpcompile.capture("preset:tiny-qwen3")
    assert isinstance(graph, fx.GraphModule)
    assert sum(node.op == "placeholder" for node in graph.graph.nodes) == 4
    with pytest.raises(tpcompile.UsageError, match="have shapes but no data"):
        graph(*(torch.zeros(1, dtype=torch.long) for _ in range(4)))


def test_passes_of_ones_own() -> None:
    ids = torch.randint(1013, (2, 5))
    passes = [current for current in default_pipeline(2) if current.name != "fuse-add-norm"]
    with _compiled(tp=2, pipeline=passes) as unfused, _compiled(tp=2) as standard:
        assert len(unfused.stages) == len(standard.stages) - 1
        assert relative_error(unfused(ids).logits, standard(ids).logits) < TOLERANCE


def test_a_stage_runs() -> None:
    pair = preset_pair("tiny-qwen3")
    packed = pack(torch.randint(1013, (1, 6)))
    inputs = {
        "input_ids": packed.input_ids,
        "positions": packed.positions,
        "starts": packed.starts,
        "logit_rows": packed.logit_rows,
    }
    with _compiled(tp=3) as model:
        first, *_, last = (stage.run(pair.read, **inputs) for stage in model.stages)
    assert len(first) == 1
    assert len(last) == 3
    assert relative_error(last[0], first[0]) < TOLERANCE


def test_what_hugging_face_code_expects_of_a_model() -> None:
    with _compiled(tp=2) as model:
        assert not model.training
        assert model.dtype == torch.float32
        assert model.device == torch.device("cpu")
        assert not any(parameter.is_meta for parameter in model.parameters())
        logits, cache = model(torch.tensor([[1, 2]]), return_dict=False)
        assert logits.shape == (1, 2, 1013) and cache.get_seq_length() == 2
        (logits,) = model(torch.tensor([[1, 2]]), return_dict=False, use_cache=False)
        assert logits.shape == (1, 2, 1013)


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "a list": ([[1, 2]], "must be a tensor"),
    "fractions": (torch.ones(1, 2), "must be 32-bit or 64-bit integers"),
    "nothing": (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
    "a token beyond the vocabulary": (torch.tensor([[1, 1013]]), "Found 1013"),
    "a negative token": (torch.tensor([[-1]]), "Found -1"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_make_no_sense(name: str) -> None:
    ids, message = BAD_CALLS[name]
    with _compiled(tp=2) as model, pytest.raises(tpcompile.UsageError, match=message):
        model(ids)


def test_a_closed_model_says_so() -> None:
    model = _compiled(tp=2)
    model.close()
    assert "class Rank0(" in model.source(0)
    for call in (lambda: model(torch.tensor([[1]])), lambda: model.gather_weight("x")):
        with pytest.raises(tpcompile.UsageError, match="closed"):
            call()


def test_the_ranks_own_their_weights() -> None:
    """Ranks copy the user's weights, so later changes on either side do not affect the other."""
    pair = preset_pair("tiny-qwen2")
    before = {name: p.clone() for name, p in pair.eager.named_parameters()}
    with tpcompile.compile(pair.eager, tp=1, simulate=True) as model, torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for name, parameter in pair.eager.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_seed_for_a_model_that_has_weights() -> None:
    with pytest.raises(tpcompile.UsageError, match="in memory"):
        tpcompile.compile(preset_pair("tiny-qwen2").eager, random_weights=1)


@pytest.mark.parametrize("seconds", [0, -1, None, "x", float("inf"), float("nan"), True])
def test_a_time_to_wait_that_is_none(seconds: Any) -> None:
    with pytest.raises(
        tpcompile.UsageError, match="rank_timeout must be a number of seconds above 0"
    ):
        tpcompile.compile("preset:tiny-qwen3", random_weights=0, rank_timeout=seconds)


@pytest.mark.parametrize("move", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_or_pickled(move: Any) -> None:
    with _compiled(tp=1) as model:
        with pytest.raises(tpcompile.UnsupportedError, match="cannot be copied or pickled"):
            move(model)
        assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 1013)


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_another_kind_of_cache_is_refused(kind: str) -> None:
    ids = torch.tensor([[1, 2]])
    with _compiled(tp=1) as model, pytest.raises(tpcompile.UnsupportedError, match=kind):
        model.generate(ids, max_new_tokens=2, cache_implementation=kind)
