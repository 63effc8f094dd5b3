"""Checkpoints of compressed-tensors in which weights that are fused elsewhere differ in format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tpcompile
from tests.captures import captured_once as capture
from tests.compressed import group, write_compressed
from tests.logits import error_of, in_turn
from tests.models import TOLERANCE
from tpcompile.backends.executor import EXECUTORS
from tpcompile.compare.program import Batch, compare_program
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.vm.groups import mlp, qkv
from tpcompile.vm.groups.mlp import MlpRows
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.program import Program
from tpcompile.vm.program.encoding import decode_program, encode_program
from tpcompile.vm.program.text import format_program, parse_program
from tpcompile.vm.proof.verify import check_program, verify_program


class Apart(NamedTuple):
    """A scheme in which the weights that are fused elsewhere have several formats."""

    groups: tuple[dict[str, Any], ...]
    ignored: str
    formats: dict[str, str]
    """The format of the weight of each projection."""
    changes: dict[str, Any]


_ALIKE = "int8 for v and up, q ignored, as many heads of each"
_INT4, _INT8 = "int4:32:f32", "int8:row:f32:offsets"
_ALL = ("q", "k", "v", "gate", "up")
APART = {
    **{
        f"{left} ignored": Apart(
            (group(4, 32),),
            f"re:.*{left}_proj",
            {**dict.fromkeys(_ALL, _INT4), left: "f32"},
            {"intermediate_size": 192},
        )
        for left in ("k", "v", "gate", "up")
    },
    "q ignored, with biases": Apart(
        (group(4, 32),),
        "re:.*q_proj",
        {**dict.fromkeys(_ALL, _INT4), "q": "f32"},
        {"name": "tiny-qwen2", "intermediate_size": 192},
    ),
    _ALIKE: Apart(
        (group(4, 32), group(8, symmetric=False, targets=["re:.*(v|up)_proj"])),
        "re:.*q_proj",
        {"q": "f32", "k": _INT4, "v": _INT8, "gate": _INT4, "up": _INT8},
        {"intermediate_size": 192, "num_key_value_heads": 6},
    ),
    "gelu, int8 for gate": Apart(
        (group(4, 32), group(8, symmetric=False, targets=["re:.*gate_proj"])),
        "lm_head",
        {**dict.fromkeys(_ALL, _INT4), "gate": _INT8},
        {
            "model_type": "llama",
            "hidden_act": "gelu",
            "mlp_bias": True,
            "hidden_size": 96,
            "intermediate_size": 192,
        },
    ),
}


@pytest.fixture(scope="module", params=APART)
def apart(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Apart]:
    case = APART[request.param]
    directory = tmp_path_factory.mktemp("apart")
    ignore = ("lm_head", case.ignored)
    return directory, write_compressed(directory, *case.groups, ignore=ignore, **case.changes), case


@pytest.mark.parametrize(("apart", "backend", "tp"), in_turn(APART), indirect=["apart"])
def test_fused_weights_of_several_formats(
    apart: tuple[Path, Any, Apart], backend: str, tp: int
) -> None:
    """Queries, keys and values, or gate and up, are then computed from a weight each."""
    directory, truth, case = apart
    tensors = capture(str(directory)).tensors
    formats = {
        name: {
            str(tensor.format or "f32")
            for key, tensor in tensors.items()
            if key.endswith(f"{name}_proj.weight")
        }
        for name in case.formats
    }
    assert formats == {name: {text} for name, text in case.formats.items()}
    assert error_of(directory, truth, tp, backend) < TOLERANCE


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_fused_weights_of_several_formats_in_bf16(tmp_path: Path, backend: str) -> None:
    """Instructions of one projection may have kernels for values in bf16 and for integers."""
    ignore = ("lm_head", "re:.*(v|up)_proj")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "intermediate_size": 192}
    truth = write_compressed(tmp_path, group(4, 32), ignore=ignore, **options)
    assert error_of(tmp_path, truth, 2, backend) < 2e-2


@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_programs_of_several_formats(apart: tuple[Path, Any, Apart], lowering: str) -> None:
    """Each instruction has the format of its weight, also in text and words, and is verified."""
    directory, _, case = apart
    options = {"tp": 2, "target": "cpu", "workers": 3, "lowering": lowering}
    program = tpcompile.schedule(str(directory), **options).program  # type: ignore[arg-type]
    read = _operands(program)
    formats = {
        part: str(operands.format) for name, operands in read.items() for part in name.split("_")
    }
    assert formats == case.formats
    assert check_program(program) == []
    assert parse_program(format_program(program)) == program
    assert decode_program(encode_program(program), program) == program
    if case.formats["gate"] == case.formats["up"]:
        EXECUTORS["triton"].check(program)
    else:
        with pytest.raises(tpcompile.UnsupportedError, match=r"triton .* kernel for norm_gate"):
            EXECUTORS["triton"].check(program)


def test_comparison_of_a_program_of_several_formats(apart: tuple[Path, Any, Apart]) -> None:
    """Every value agrees with eager's, on both executors; gate is a value if it is alone."""
    directory, _, case = apart
    for backend in ("reference", "native"):
        passes = decode_pipeline(2, spans=2, block=4)
        comparison = compare_program(str(directory), passes, Batch((9, 3), 1), backend=backend)
        assert comparison.ok, comparison.table()
        names = {row.node for row in comparison.rows}
        assert ("gate" in names) == (case.formats["gate"] != case.formats["up"])


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint in which fused weights have the same shape, and several formats."""
    directory, case = tmp_path_factory.mktemp("alike"), APART[_ALIKE]
    ignore = ("lm_head", case.ignored)
    return directory, write_compressed(directory, *case.groups, ignore=ignore, **case.changes)


def _operands(program: Program) -> dict[str, Any]:
    """Return the operands of each projection of the first layer and rank."""
    operands = {}
    for instruction in program.instructions:
        if (
            isinstance(instruction, NormQkvRopeAppend | NormQkvRows | MlpRows)
            and instruction.layer == instruction.rank == 0
        ):
            weight = program.buffers[instruction.at.weight].name
            operands[weight.removeprefix("l0_").partition("_proj")[0]] = instruction.at
    return operands


WRONG: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], Any], str]] = {
    "keys from the weight of values": (
        "k",
        lambda operands, projections: replace(operands, weight=projections["v"].weight),
        rf"format must be {_INT8}, .*, got {_INT4}",
    ),
    "values from the weight of queries": (
        "v",
        lambda operands, projections: replace(operands, weight=projections["q"].weight),
        rf"format must be f32, .*, got {_INT8}",
    ),
    "keys in the format of values": (
        "k",
        lambda operands, projections: replace(operands, format=projections["v"].format),
        rf"format must be {_INT4}, .*, got {_INT8}",
    ),
    "keys after queries": (
        "k",
        lambda operands, projections: replace(operands, first_row=operands.width),
        "first_row must be 0, got 16",
    ),
    "values after keys": (
        "v",
        lambda operands, projections: replace(operands, first_row=2 * operands.width),
        "first_row must be 0, got 32",
    ),
    "gate from the weight of up": (
        "gate",
        lambda operands, projections: replace(operands, weight=projections["up"].weight),
        rf"format must be {_INT8}, .*, got {_INT4}",
    ),
    "up in the format of gate": (
        "up",
        lambda operands, projections: replace(operands, format=projections["gate"].format),
        rf"format must be {_INT8}, .*, got {_INT4}",
    ),
    "up beside the residual": (
        "up",
        lambda operands, projections: replace(operands, gate=operands.normed.x),
        r"gate must be a scratch buffer float\[normed.batch=1, ffn=",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_parts_of_other_weights_are_refused(
    alike: tuple[Path, Any], lowering: str, name: str
) -> None:
    part, change, message = WRONG[name]
    options = {"tp": 2, "target": "cpu", "workers": 3, "lowering": lowering}
    program = tpcompile.schedule(str(alike[0]), **options).program  # type: ignore[arg-type]
    operands = _operands(program)
    wrong = change(operands[part], operands)
    instructions: tuple[Any, ...] = tuple(
        replace(instruction, at=wrong)
        if getattr(instruction, "at", None) is operands[part]
        else instruction
        for instruction in program.instructions
    )
    with pytest.raises(tpcompile.VerifyError, match=message):
        verify_program(replace(program, instructions=instructions))


def _keys_and_values_swapped(patch: pytest.MonkeyPatch) -> None:
    right = qkv._sources

    def sources(*args: Any) -> Any:
        by_part = right(*args)
        return {**by_part, Part.K: by_part[Part.V], Part.V: by_part[Part.K]}

    patch.setattr(qkv, "_sources", sources)


def _gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    right, other = mlp._deal, {"gate_": "up_", "up_": "gate_"}
    patch.setattr(
        mlp,
        "_deal",
        lambda builder, node, kind, side, **more: right(builder, node, kind, other[side], **more),
    )


@pytest.mark.parametrize("swap", [_keys_and_values_swapped, _gate_and_up_swapped])
def test_parts_of_weights_of_the_same_shape_are_other_values(
    alike: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, swap: Callable[..., None]
) -> None:
    """Operands agree with the weight of another part if its shape and its format are taken too."""
    assert error_of(*alike, tp=2, backend="reference") < TOLERANCE
    swap(monkeypatch)
    with pytest.raises(tpcompile.VerifyError, match="violates the rule 'values'"):
        error_of(*alike, tp=2, backend="reference")
