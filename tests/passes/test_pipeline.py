"""Pipelines round-trip through text, and errors in the text name the mistake."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import TOLERANCE, batch, eager_logits, preset_pair, relative_error, stage_logits
from tests.passes.decoding import DECODE
from tests.passes.steps import STANDARD, TINY_VOCABULARY
from tests.stages import graph_after
from tpcompile.errors import CompileError, PassError, ShardingError, UsageError
from tpcompile.passes import (
    PASSES,
    PIPELINES,
    Pass,
    decode_pipeline,
    default_pipeline,
    for_ranks,
    parse_pipeline,
    pipeline_text,
    run_passes,
)
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.canonicalize import Canonicalize
from tpcompile.passes.interleave_rotary import InterleaveRotary
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.passes.raise_norm import RaiseNorm

EXAMPLES = settings(deadline=None, derandomize=True)

_OPTIONLESS = [kind for kind in PASSES.values() if kind is not PlanSharding]
_PASSES = st.one_of(
    st.sampled_from(_OPTIONLESS).map(lambda kind: kind()),
    st.builds(
        PlanSharding,
        tp=st.integers(-3, 1000),
        ffn_grain=st.integers(-3, 1000),
        vocab_grain=st.integers(-3, 1000),
    ),
)
_SPACE = st.sampled_from(["", " ", "  ", "\n"])


@EXAMPLES
@given(st.lists(_PASSES, min_size=1, max_size=6))
def test_text_round_trips(passes: list[Pass]) -> None:
    text = pipeline_text(passes)
    assert parse_pipeline(text) == passes
    assert pipeline_text(parse_pipeline(text)) == text


@EXAMPLES
@given(_PASSES, _PASSES, st.lists(_SPACE, min_size=3, max_size=3))
def test_space_around_passes_means_nothing(
    first: Pass, second: Pass, spaces: Sequence[str]
) -> None:
    before, between, after = spaces
    parts = [pipeline_text([current]) for current in (first, second)]
    text = f"{before}{parts[0]}{between},{after}{parts[1]}{before}"
    assert parse_pipeline(text) == [first, second]


@EXAMPLES
@given(st.text(alphabet="canoilze{}=,- 0plsh_rdg\n", max_size=30))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    try:
        passes = parse_pipeline(text)
    except UsageError:
        return
    assert parse_pipeline(pipeline_text(passes)) == passes


def test_the_standard_pipeline_in_order() -> None:
    assert [current.name for current in default_pipeline(4)] == STANDARD[1:]
    assert pipeline_text(default_pipeline(4)) == ",".join(STANDARD[1:]).replace(
        "plan-sharding", "plan-sharding{tp=4}"
    )
    assert "plan-sharding{tp=1}" in pipeline_text(default_pipeline())


def test_all_passes_are_the_standard_ones_and_the_optional() -> None:
    optional = ["sequence-parallel", "interleave-rotary", *DECODE]
    assert list(PASSES) == [*STANDARD[1:], *optional]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_has_a_name(name: str) -> None:
    make = {"standard": default_pipeline, "decode": decode_pipeline}[name]
    assert for_ranks(parse_pipeline(name), 3) == make(3)
    assert parse_pipeline(name) == parse_pipeline(f" {name} ") == parse_pipeline(f"{name}{{}}")
    assert name not in PASSES
    assert parse_pipeline(f"canonicalize,{name},raise-norm") == [
        Canonicalize(),
        *parse_pipeline(name),
        RaiseNorm(),
    ]


def test_a_pipeline_has_options() -> None:
    passes = parse_pipeline("decode{spans=4,block=16,interleaved=true}")
    assert for_ranks(passes, 2) == decode_pipeline(2, spans=4, block=16, interleaved=True)
    assert InterleaveRotary() in passes
    names = [current.name for current in passes]
    assert names.index("interleave-rotary") == names.index("raise-attention") + 1
    for no in ("standard{interleaved=False}", "standard{interleaved=false}"):
        assert parse_pipeline(no) == parse_pipeline("standard")
    passes = parse_pipeline("standard{interleaved=True,block=7}")
    assert CacheKv(7) in passes
    assert [p for p in for_ranks(passes, 3) if not isinstance(p, CacheKv)] == [
        p for p in default_pipeline(3, interleaved=True) if not isinstance(p, CacheKv)
    ]


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_a_frozen_dataclass_in_a_file_of_its_name(name: str) -> None:
    kind = PASSES[name]
    assert kind.name == name
    assert kind.__module__ == "tpcompile.passes." + name.replace("-", "_")
    assert kind.__module__ in sys.modules
    assert kind() == kind()
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert (kind.__doc__ or "").split("\n")[0].endswith(".")


def test_ranks_are_filled_in_where_they_are_not_said() -> None:
    passes = for_ranks(parse_pipeline("plan-sharding{ffn_grain=8},plan-sharding{tp=3}"), 5)
    assert passes == [PlanSharding(tp=5, ffn_grain=8), PlanSharding(tp=3)]


def test_a_number_of_ranks_that_is_said_stays() -> None:
    assert for_ranks(parse_pipeline("plan-sharding{tp=1}"), 4) == [PlanSharding(tp=1)]


def test_an_option_given_twice() -> None:
    with pytest.raises(UsageError, match="sets the option tp twice"):
        parse_pipeline("plan-sharding{tp=2,tp=3}")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("fuse-qvk", "Unknown pass 'fuse-qvk'", "Did you mean fuse-qkv"),
        ("canonicalise", "Unknown pass 'canonicalise'", "Did you mean canonicalize"),
        ("zzz", "Unknown pass 'zzz'", "Known: canonicalize, split-heads"),
        ("decod", "Unknown pass 'decod'", "Did you mean decode?"),
        ("standart", "Unknown pass 'standart'", "Did you mean standard?"),
        ("decode{span=2}", "The pipeline decode has no option 'span'", "Did you mean spans?"),
        ("decode{tp=2}", "The pipeline decode has no option 'tp'", "spans"),
        (
            "decode{spans=x}",
            "Invalid value 'x' for the option spans of the pipeline decode",
            "spans=INT",
        ),
        ("decode{interleaved=1}", "Invalid value '1'", "interleaved=true or false"),
        ("plan_sharding", "Unknown pass 'plan_sharding'", "Did you mean plan-sharding"),
        ("plan-sharding{tpp=2}", "has no option 'tpp'", "Did you mean tp?"),
        ("plan-sharding{fn_grain=2}", "has no option 'fn_grain'", "Did you mean ffn_grain"),
        (
            "plan-sharding{name=x}",
            "has no option 'name'",
            "Known: tp, ffn_grain, experts, vocab_grain",
        ),
        ("canonicalize{x=1}", "canonicalize has no option 'x'", "It has no options"),
        ("plan-sharding{tp=two}", "Invalid value 'two'", "tp=INT"),
        ("plan-sharding{tp=2.5}", "Invalid value '2.5'", "tp=INT"),
        ("plan-sharding{tp=}", "Invalid value ''", "tp=INT"),
        ("plan-sharding{tp}", "Invalid value ''", "tp=INT"),
    ],
)
def test_unknown_names_and_values(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_pipeline(text)
    assert message in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a pass is missing at character 1"),
        ("   ", "a pass is missing at character 1"),
        (",canonicalize", "a pass is missing at character 1"),
        ("canonicalize,", "a pass is missing at character 14"),
        ("canonicalize, ", "a pass is missing at character 14"),
        ("canonicalize,,raise-norm", "a pass is missing at character 14"),
        ("raise-norm,{tp=2}", "a pass is missing at character 12"),
        ("canonicalize raise-norm", "a comma or the end is missing at character 14"),
        ("canonicalize;raise-norm", "a comma or the end is missing at character 13"),
        ("canonicalize}", "a comma or the end is missing at character 13"),
        ("canonicalize,plan-sharding{tp=2", "a closing brace is missing at character 27"),
        ("plan-sharding{{tp=2}}", "a comma or the end is missing at character 14"),
        ("plan-sharding{tp=2}{tp=2}", "a comma or the end is missing at character 20"),
    ],
)
def test_broken_text_says_where_and_what(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"Invalid pipeline: {problem}") as refused:
        parse_pipeline(text)
    assert repr(text) in str(refused.value)
    assert "pass,pass{option=value,option=value}" in str(refused.value)


_RAISED = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding"
_SHARDED = f"{_RAISED},shard-linears,kv-heads,vocab-parallel,insert-collectives"


@pytest.mark.parametrize(
    "text",
    [
        "raise-swiglu,raise-norm,canonicalize",
        "raise-norm",
        f"{_RAISED},vocab-parallel,insert-collectives",
        f"{_RAISED},shard-linears,insert-collectives",
        f"{_RAISED},fuse-add-norm,shard-linears,kv-heads,insert-collectives",
        f"{_RAISED},shard-linears,plan-sharding{{tp=3}},insert-collectives",
        f"{_RAISED},insert-collectives,shard-linears",
        f"{_SHARDED},fuse-qkv,fuse-gate-up,fuse-add-norm,sequence-parallel",
        ",".join(f"{name},{name}" for name in _SHARDED.split(",")),
    ],
)
def test_another_order_gives_the_same_logits(text: str) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, for_ranks(parse_pipeline(text), 2))
    logits = stage_logits(gm, pair, batch((3, 1), TINY_VOCABULARY))
    assert relative_error(logits, eager_logits(pair.eager, (3, 1))) < TOLERANCE


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("canonicalize,raise-attention", PassError, "no attention in token-major form"),
        ("canonicalize,shard-linears", PassError, "Put plan-sharding before this pass"),
        ("canonicalize,plan-sharding", ShardingError, "(In the pass plan-sharding{tp=2}, after"),
        (f"{_RAISED},kv-heads", PassError, "or a pipeline without kv-heads"),
        (
            f"{_RAISED},fuse-qkv,shard-linears",
            UsageError,
            "shard-linears must run before fuse-qkv.",
        ),
        (
            f"{_RAISED},cache-kv,fuse-gate-up,kv-heads,shard-linears",
            UsageError,
            "kv-heads must run after shard-linears and before fuse-gate-up and cache-kv.",
        ),
    ],
)
def test_an_order_that_cannot_work_is_refused(
    text: str, kind: type[CompileError], message: str
) -> None:
    with pytest.raises(kind) as refused:
        run_passes(preset_pair("tiny-qwen3").captured.graph, for_ranks(parse_pipeline(text), 2))
    assert message in str(refused.value)


@pytest.mark.parametrize("fusion", ["fuse-qkv", "fuse-gate-up"])
def test_linears_that_were_joined_before_are_not_sharded(fusion: str) -> None:
    """The passes that made a graph are unknown if its text is read from a file."""
    captured = preset_pair("tiny-qwen3").captured.graph
    joined, _ = run_passes(captured, for_ranks(parse_pipeline(f"{_RAISED},{fusion}"), 2))
    with pytest.raises(ShardingError, match="must be a separate linear"):
        run_passes(joined, parse_pipeline("shard-linears"))


def test_a_name_of_a_pass_and_a_pipeline_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES._entries, "cache-kv", PIPELINES["decode"])
    with pytest.raises(UsageError, match="cache-kv is ambiguous: a pass and a pipeline"):
        parse_pipeline("cache-kv")
