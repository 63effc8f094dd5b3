"""Checkpoints that compressed-tensors wrote, from their files to tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once as capture
from tests.compressed import floats, group, write_compressed
from tests.logits import IDS, check_logits, error_of, in_turn
from tests.models import TOLERANCE, relative_error
from tests.quantized import rewritten
from tpcompile.backends.memory import StepMemory
from tpcompile.compare.model import compare_with_eager
from tpcompile.ir import check_parameters
from tpcompile.ir.format import Component
from tpcompile.ir.meta import Parameter
from tpcompile.ir.recipe import Recipe, component_of, concat, shape_of, take
from tpcompile.ir.simulate import whole_value
from tpcompile.passes import default_pipeline
from tpcompile.runtime.weights import opened, weights_of
from tpcompile.vm.groups.project import LinearTerms
from tpcompile.vm.program.encoding import first_weights
from tpcompile.vm.program.instruction import Range

NARROW = {"hidden_size": 76, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes of which neither 8 nor 16 is a divisor; three heads."""
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 384}
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
"""The layout `int-quantized` is that of schemes that also round activations."""


class Case(NamedTuple):
    """The groups of a scheme, the format that they give, and a configuration."""

    groups: tuple[dict[str, Any], ...]
    format: str
    changes: dict[str, Any]


CASES = {
    "int4 in groups of 32": Case(
        (group(4, 32),), "int4:32:f32", {"hidden_size": 96, "intermediate_size": 160}
    ),
    "int4 in groups of 64 with offsets": Case(
        (group(4, 64, symmetric=False),),
        "int4:64:bf16:offsets",
        {"intermediate_size": 192, "num_attention_heads": 4, "dtype": torch.bfloat16},
    ),
    "int4 in groups of 128": Case(
        (group(4, 128),), "int4:128:bf16", {**WIDE, "dtype": torch.bfloat16}
    ),
    "int4 in rows with offsets": Case(
        (group(4, symmetric=False),), "int4:row:f32:offsets", {**NARROW, "intermediate_size": 90}
    ),
    "int8 in rows": Case(
        (group(8),),
        "int8:row:f32",
        {
            "name": "tiny-qwen2",
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 93,
        },
    ),
    # Of three ranks, the second has the heads 3 to 5: columns of two groups, though it has few.
    "int8 in groups of 64 with offsets": Case(
        (group(8, 64, symmetric=False),), "int8:64:f32:offsets", WIDE
    ),
    "int8, not packed, with offsets": Case(
        (group(8, layout="int-quantized", symmetric=False, input_activations=DYNAMIC),),
        "int8:row:bf16:offsets",
        {**NARROW, "intermediate_size": 83, "dtype": torch.bfloat16},
    ),
    "4 bits, not packed": Case(
        (group(4, 32, layout="int-quantized", input_activations=DYNAMIC),),
        "int8:32:f32",
        {"intermediate_size": 160},
    ),
    "fp8 in rows": Case((floats("channel"),), "fp8:row:f32", {**NARROW, "intermediate_size": 83}),
    "fp8 with a scale per weight": Case(
        (floats("tensor"),), "fp8:row:bf16", {"name": "tiny-qwen2", "dtype": torch.bfloat16}
    ),
    "fp8 in blocks": Case(
        (floats("block", [16, 32]),), "fp8:32:f32", {"hidden_size": 96, "intermediate_size": 160}
    ),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Case]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("compressed")
    return directory, write_compressed(directory, *case.groups, **case.changes), case


@pytest.mark.parametrize(("checkpoint", "backend", "tp"), in_turn(CASES), indirect=["checkpoint"])
def test_logits(checkpoint: tuple[Path, Any, Case], backend: str, tp: int) -> None:
    directory, truth, _ = checkpoint
    check_logits(directory, truth, backend, tp)


def test_the_files_own_dtype(checkpoint: tuple[Path, Any, Case]) -> None:
    """The modules of a checkpoint in bf16 round its weights to bf16."""
    directory, truth, case = checkpoint
    formats = {
        str(tensor.format) for tensor in capture(str(directory)).tensors.values() if tensor.format
    }
    assert formats == {case.format}
    if "bf16" in case.format:
        with tpcompile.compile(str(directory), tp=2, simulate=True, backend="torch") as model:
            with torch.no_grad():
                wanted = truth(IDS).logits
            assert relative_error(model(IDS).logits.float(), wanted) < 2e-2


@pytest.mark.parametrize("tp", [1, 3])
def test_saved_tensors(checkpoint: tuple[Path, Any, Case], tmp_path: Path, tp: int) -> None:
    """A checkpoint that a compiled model saves has the same tensors, bit for bit."""
    directory, truth, _ = checkpoint
    with tpcompile.compile(str(directory), tp=tp, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path)
        assert model.num_parameters() == truth.num_parameters()
        state = model.state_dict()
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert before.keys() == after.keys() == state.keys() - {"lm_head.weight"}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and torch.equal(tensor, state[name]), name
        assert tensor.dtype == after[name].dtype == state[name].dtype
    schemes = [json.loads((path / "config.json").read_text()) for path in (directory, tmp_path)]
    assert schemes[0]["quantization_config"] == schemes[1]["quantization_config"]


GROUPS = (group(4, 32, symmetric=False), group(8, symmetric=False, targets=["re:.*down_proj"]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint of two layouts with offsets, of which two ranks cut groups."""
    directory = tmp_path_factory.mktemp("mixed")
    packed, plain = GROUPS
    plain = {**plain, "format": "int-quantized", "input_activations": DYNAMIC}
    truth = write_compressed(directory, packed, plain, intermediate_size=192)
    return directory, truth


def test_groups_of_different_bits(mixed: tuple[Path, Any]) -> None:
    """The most specific target decides, as in the library."""
    directory, truth = mixed
    scheme = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert scheme["format"] == "mixed-precision"
    formats = {name: str(tensor.format) for name, tensor in capture(str(directory)).tensors.items()}
    down = {text for name, text in formats.items() if "down_proj" in name}
    gate = {text for name, text in formats.items() if "gate_proj" in name}
    assert (down, gate) == ({"int8:row:f32:offsets"}, {"int4:32:f32:offsets"})
    assert error_of(directory, truth, 2, "reference") < TOLERANCE


def test_one_layer_in_its_values(tmp_path: Path) -> None:
    ignore = ("lm_head", r"re:.*layers\.1\..*")
    truth = write_compressed(tmp_path, group(4, 32), ignore=ignore, intermediate_size=192)
    assert error_of(tmp_path, truth, 2, "reference") < TOLERANCE


Components = Callable[[Parameter, int], Iterator[tuple[Component, Recipe]]]


def _other(change: Callable[[Parameter, int, Component, Recipe], Recipe | None]) -> Components:
    """Return a mutant of `Parameter.components`, in which some components are others."""
    right = Parameter.components

    def components(self: Parameter, rank: int) -> Iterator[tuple[Component, Recipe]]:
        for part, recipe in right(self, rank):
            changed = None if self.type.stored.plain else change(self, rank, part, recipe)
            yield part, recipe if changed is None else changed

    return components


def _of_rank(suffix: str) -> Components:
    def change(parameter: Parameter, rank: int, part: Component, recipe: Recipe) -> Recipe | None:
        other = parameter.shards[(rank + 1) % len(parameter.shards)]
        return component_of(other, part) if part.suffix == suffix else None

    return _other(change)


def _of_next_group(suffix: str) -> Components:
    def change(parameter: Parameter, rank: int, part: Component, recipe: Recipe) -> Recipe | None:
        _, columns = shape_of(recipe)
        if part.suffix != suffix or columns < 2:
            return None
        return concat([take(recipe, 1, 1, columns), take(recipe, 1, 0, 1)], 1)

    return _other(change)


def _of_next_row(suffix: str) -> Components:
    def change(parameter: Parameter, rank: int, part: Component, recipe: Recipe) -> Recipe | None:
        rows, _ = shape_of(recipe)
        if part.suffix != suffix:
            return None
        return concat([take(recipe, 0, 1, rows), take(recipe, 0, 0, 1)], 0)

    return _other(change)


def _along_rows(suffix: str) -> Components:
    def change(parameter: Parameter, rank: int, part: Component, recipe: Recipe) -> Recipe | None:
        layout = parameter.type.layout_of(1)
        if part.suffix != suffix or layout is None:
            return None
        whole = component_of(parameter.whole, part)
        return take(whole, 0, 0, shape_of(whole)[0] // layout.ranks)

    return _other(change)


MUTANTS = {
    f"{name} {suffix}": make(suffix)
    for suffix in ("_scale", "_zero_point")
    for name, make in {
        "another rank's": _of_rank,
        "the next group's": _of_next_group,
        "the next row's": _of_next_row,
        "cut along rows": _along_rows,
    }.items()
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_other_scales_and_offsets_are_noticed(
    mixed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    """Numbers show what shapes do not, also without the rule of the checker."""
    monkeypatch.setattr(Parameter, "components", MUTANTS[name])
    monkeypatch.setattr(check_parameters, "check_components", lambda parameter, rank: None)
    try:
        error = error_of(*mixed, tp=2, backend=backend)
    except (AssertionError, tpcompile.RankError, tpcompile.UsageError):
        assert name.startswith(("another rank's", "cut along rows"))
    else:
        assert error > 100 * TOLERANCE


@pytest.mark.parametrize("name", MUTANTS)
def test_other_scales_and_offsets_are_refused(
    mixed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Parameter, "components", MUTANTS[name])
    with pytest.raises(tpcompile.CompileError, match="breaks the rule components"):
        tpcompile.schedule(str(mixed[0]), tp=2, target="cpu")


@pytest.mark.parametrize("suffix", ["_packed", "_scale", "_zero_point", ""])
def test_components_of_other_shapes(mixed: tuple[Path, Any], suffix: str) -> None:
    """A program refuses components that do not have the columns of its buffer."""
    program = tpcompile.schedule(str(mixed[0]), tp=2, target="cpu").program
    buffers = {(buffer.rank, buffer.name): buffer for buffer in program.buffers}
    wrong = "_down_proj_weight" if suffix == "" else "_o_proj_weight"

    def parameter(rank: int, name: str) -> torch.Tensor:
        buffer = buffers.get((rank, name))
        if buffer is not None and buffer.format is None:
            return torch.zeros(buffer.shape, dtype=buffer.dtype)
        owner, part = next(
            (candidate, part)
            for candidate in program.buffers
            if candidate.rank == rank and candidate.format is not None
            for part in candidate.format.components
            if candidate.name + part.suffix == name
        )
        rows, columns = owner.extents_of(part)
        more = owner.name.endswith(wrong) and part.suffix == suffix
        return torch.zeros((rows, columns + more), dtype=part.dtype.torch)

    with pytest.raises(tpcompile.UsageError, match=f"{wrong}{suffix} .*shape and dtype"):
        StepMemory(program, parameter, (torch.empty(0), torch.empty(0)))


def test_ranks_read_the_words_of_their_rows(
    mixed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.self_attn.o_proj.weight_zero_point"
    captured = capture(str(mixed[0]))
    with opened(weights_of(captured, str(mixed[0]), None)) as read:
        whole = read(name, (slice(0, 64), slice(0, 3)))
        reads: list[Any] = []
        files = read._files  # type: ignore[attr-defined]
        part = files.read
        monkeypatch.setattr(files, "read", lambda *args: reads.append(args) or part(*args))
        assert torch.equal(read(name, (slice(19, 35), slice(1, 3))), whole[19:35, 1:])
    assert reads == [(name, (slice(2, 5), slice(1, 3)))]


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "no offsets": ({"weight_zero_point": None}, "lacks the tensor .*weight_zero_point"),
    "no shape": ({"weight_shape": None}, "lacks the tensor .*weight_shape"),
    "another shape": (
        {"weight_shape": torch.tensor([64, 95])},
        r"weight_shape does not.*Found 95 at \[1\]. Expected 96",
    ),
    "a shape in fp32": ({"weight_shape": torch.tensor([64.0, 96.0])}, "dtype.*F32.*I64"),
    "a longer shape": ({"weight_shape": torch.tensor([1, 64, 96])}, "shape of the tensor"),
    "values in int8": ({"weight_packed": torch.zeros(64, 12, dtype=torch.int8)}, "dtype.*I8.*I32"),
    "unpacked offsets": (
        {"weight_zero_point": torch.zeros(64, 3, dtype=torch.int8)},
        "weight_zero_point must have the dtype.*I8.*I32",
    ),
    "offsets of other rows": (
        {"weight_zero_point": torch.zeros(7, 3, dtype=torch.int32)},
        r"weight_zero_point does not match.*\(7, 3\).*\(8, 3\)",
    ),
    "an order": (
        {"weight_g_idx": torch.zeros(96, dtype=torch.int32)},
        "does not have: .*weight_g_idx.*order of the columns",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_scheme(mixed: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    tensors, message = FILES[name]
    module = "model.layers.1.self_attn.o_proj"
    changes = {f"{module}.{last}": tensor for last, tensor in tensors.items()}
    directory = rewritten(mixed[0], tmp_path / "made", **changes)
    with pytest.raises(tpcompile.CheckpointError, match=message):
        tpcompile.compile(str(directory), backend="torch")


def test_fused_tensors_of_weights_in_different_formats(tmp_path: Path) -> None:
    """The rows of one fused tensor cannot be those of weights of which one has no such tensor."""
    ignore = ("lm_head", "re:.*k_proj")
    write_compressed(tmp_path / "written", group(4, 32), ignore=ignore, intermediate_size=192)
    module = "model.layers.0.self_attn"
    changes = {
        f"{module}.q_proj.weight_packed": None,
        f"{module}.qkv_proj.weight_packed": torch.zeros(160, 8, dtype=torch.int32),
    }
    directory = rewritten(tmp_path / "written", tmp_path / "made", **changes)
    with pytest.raises(
        tpcompile.CheckpointError, match=r"lacks the tensor .*q_proj\.weight_packed"
    ):
        tpcompile.compile(str(directory), backend="torch")


def test_first_weights_are_the_words_of_their_columns(mixed: tuple[Path, Any]) -> None:
    """The columns of a term may begin within a word."""
    program = tpcompile.schedule(str(mixed[0]), tp=2, target="cpu").program
    buffers = program.buffers
    term = next(
        instruction
        for instruction in program.instructions
        if isinstance(instruction, LinearTerms)
        and buffers[instruction.at.weight].name == "l1_o_proj_weight"
    )
    assert buffers[term.at.weight].shape == (64, 48)
    for start, byte in ((0, 0), (12, 4), (32, 16)):
        part = replace(term, rows=Range(3, 5), columns=Range(start, 48))
        (first,) = first_weights(replace(program, instructions=(part,))).tolist()
        assert first == [term.at.weight, 3 * 24 + byte, 2 * 24 - byte]


def test_comparison_with_eager_in_bf16(tmp_path: Path) -> None:
    """The reference in fp32 has the same integers, and scales that were rounded to bf16."""
    write_compressed(tmp_path, *GROUPS, dtype=torch.bfloat16, intermediate_size=192)
    comparison = compare_with_eager(
        str(tmp_path), default_pipeline(2), lengths=(5, 3), simulate=True
    )
    assert comparison.ok, comparison.table()
    assert 0 < max(row.error for row in comparison.rows if row.beside_fp32) < 0.1


def test_shapes_in_32_bits(mixed: tuple[Path, Any], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight_shape"
    directory = rewritten(mixed[0], tmp_path / "made", **{name: torch.tensor([64, 96]).int()})
    assert error_of(directory, mixed[1], 1, "torch") < TOLERANCE


def test_random_weights(mixed: tuple[Path, Any]) -> None:
    """They are those of every tp, and have the spread of a model."""
    logits = []
    for tp in (1, 2):
        with tpcompile.compile(
            str(mixed[0]), tp=tp, random_weights=3, simulate=True, backend="torch"
        ) as model:
            logits.append(model(IDS).logits)
            packed = model.gather_weight("model.layers.0.mlp.gate_proj.weight_packed")
            assert packed.dtype == torch.int32 and len(packed.unique()) > 1000
            assert model.gather_weight("model.layers.0.mlp.down_proj.weight").float().std() > 20
    assert relative_error(*logits) < TOLERANCE


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    """Write a checkpoint in bf16 with scales in fp32, which bf16 would round."""
    written, directory = tmp_path / "written", tmp_path / "exact"
    write_compressed(
        written, group(4, 32), group(8, targets=["re:.*down_proj"]), intermediate_size=192
    )
    stored = load_file(written / "model.safetensors")
    rounded = {
        name: tensor.bfloat16()
        for name, tensor in stored.items()
        if tensor.is_floating_point() and not name.endswith("_scale")
    }
    rewritten(written, directory, **rounded)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return directory


def test_scales_keep_their_dtype(exact: Path, tmp_path: Path) -> None:
    """They reach memory and saved files as they are stored, under a model in 16 bits."""
    scales = {
        name: tensor
        for name, tensor in load_file(exact / "model.safetensors").items()
        if name.endswith("_scale")
    }
    assert any(not torch.equal(scale, scale.bfloat16().float()) for scale in scales.values())
    captured = capture(str(exact))
    stored = {
        str(tensor.format) for tensor in captured.tensors.values() if tensor.format is not None
    }
    assert stored == {"int4:32:f32", "int8:row:f32"}
    with tpcompile.compile(str(exact), tp=2, simulate=True, backend="native") as model:
        assert model.dtype == torch.bfloat16
        model.generate(IDS, max_new_tokens=4, do_sample=False)
        assert model.steps.program
        model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    wanted = load_file(exact / "model.safetensors")
    assert saved.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor), name


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_products_with_scales_in_fp32_are_exact(exact: Path, backend: str) -> None:
    """Modules and programs compute with the scales that are stored."""
    captured = capture(str(exact))
    read = weights_of(captured, str(exact), None)
    make: Any = AutoModelForCausalLM.from_config
    config = AutoConfig.from_pretrained(exact)
    del config.quantization_config
    with opened(read) as source, torch.no_grad():
        eager = make(config, dtype=torch.float32).eval()
        for name, parameter in eager.named_parameters():
            parameter.copy_(whole_value(captured.tensors[name], source, torch.float32))
        with tpcompile.compile(
            str(exact), tp=2, simulate=True, backend=backend, dtype="float32"
        ) as model:
            assert relative_error(model(IDS).logits, eager(IDS).logits) < TOLERANCE


def test_scales_are_never_rounded(exact: Path) -> None:
    """A capture that did not see the files has scales in the dtype of the model."""
    captured = capture(AutoConfig.from_pretrained(exact), dtype=torch.bfloat16)
    with (
        pytest.raises(tpcompile.CheckpointError, match=r"weight_scale must not be rounded.*F32"),
        opened(weights_of(captured, str(exact), None)),
    ):
        pass
