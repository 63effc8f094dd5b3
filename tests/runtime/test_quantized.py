"""Checkpoints in int8, from their files to tokens: the weights are values times scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tpcompile
from tests.models import TOLERANCE, relative_error
from tests.quantized import rewritten, scheme, write_quantised
from tpcompile.compare.source import Source, eager_model
from tpcompile.frontend import capture, parse_graph
from tpcompile.frontend.stored import compressed
from tpcompile.ir.checker import check_graph
from tpcompile.ir.text import format_graph
from tpcompile.passes import decode_pipeline, default_pipeline, run_passes
from tpcompile.runtime.backend import MODULES
from tpcompile.runtime.weights import opened, weights_of
from tpcompile.vm.program.text import format_program, parse_program

GROUP = 32
"""Two ranks cut the columns of projections within groups."""
IDS = torch.arange(1, 25).reshape(2, 12)
STEPS = 4
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a directory, and the model with the values that it stands for."""
    directory = tmp_path_factory.mktemp("int8")
    return directory, write_quantised(directory, columns=GROUP, intermediate_size=192)


def configured(directory: Path, target: Path, **changes: Any) -> Path:
    """Copy the configuration of a checkpoint with changes of its scheme."""
    target.mkdir()
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_logits_and_tokens(checkpoint: tuple[Path, Any], backend: str, tp: int) -> None:
    directory, eager = checkpoint
    with torch.no_grad():
        wanted = eager(IDS).logits
    mask = torch.ones_like(IDS)
    options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}
    tokens = eager.generate(IDS, **options)
    with tpcompile.compile(str(directory), tp=tp, simulate=True, backend=backend) as model:
        assert relative_error(model(IDS).logits, wanted) < TOLERANCE
        assert torch.equal(model.generate(IDS, **options), tokens)


@pytest.mark.parametrize("columns", [0, 16])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_rows_and_groups_in_bf16(tmp_path: Path, name: str, columns: int) -> None:
    """The modules round the weights to bf16, as the model that the checkpoint stands for."""
    eager = write_quantised(tmp_path, name, columns, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = eager(IDS).logits.float()
    with tpcompile.compile(str(tmp_path), tp=2, simulate=True, backend="torch") as model:
        assert relative_error(model(IDS).logits.float(), wanted) < 2e-2


def test_ranks_hold_what_the_files_hold(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """A checkpoint that a compiled model saves has the same tensors."""
    directory, _ = checkpoint
    with tpcompile.compile(str(directory), tp=3, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
        for name in before
    )
    assert capture(str(tmp_path)).tensors == capture(str(directory)).tensors


def test_eager_values(checkpoint: tuple[Path, Any]) -> None:
    """`compare` fills Hugging Face's model with the values of the weights."""
    directory, eager = checkpoint
    captured = capture(str(directory))
    with opened(weights_of(captured, str(directory), None)) as read:
        model = eager_model(Source(captured, read))
    for expected, actual in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_the_text_of_graphs_and_programs(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    captured = capture(str(directory))
    for passes in (default_pipeline(2), decode_pipeline(2)):
        for stage in run_passes(captured.graph, passes)[1]:
            text = format_graph(stage.graph)
            assert text.count(f" as int8:{GROUP}:f32") >= 8
            assert format_graph(parse_graph(text)) == text
    step = tpcompile.schedule(str(directory), tp=2, target="cpu")
    written = format_program(step.program)
    assert f"dtype=i8 shape=[64,96] format=int8:{GROUP}:f32 first=96" in written
    assert parse_program(written) == step.program


def test_other_ops_refuse_such_weights(checkpoint: tuple[Path, Any]) -> None:
    """An addition would take integers for values."""
    lines = format_graph(capture(str(checkpoint[0])).graph).splitlines()
    (place,) = (n for n, line in enumerate(lines) if line.strip().startswith("%l0_o_proj ="))
    lines[place] = lines[place].replace("aten.linear", "aten.add")
    problems = check_graph(parse_graph("\n".join(lines), check=False))
    assert [(problem.rule, problem.node) for problem in problems][:1] == [("format", "l0_o_proj")]
    assert "stored as their values" in problems[0].expected


def test_traffic_is_that_of_values_and_scales(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    step = tpcompile.schedule(str(directory), target="cpu")
    projections = [
        instruction
        for instruction in step.program.instructions
        if instruction.name.startswith("linear")
    ]
    assert projections
    for projection in projections:
        rows, columns = projection.weight_shape  # type: ignore[attr-defined]
        assert projection.traffic == rows * (columns + 4 * (columns // GROUP))  # type: ignore[attr-defined]


def test_random_weights(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    with tpcompile.compile(
        str(directory), random_weights=3, simulate=True, backend="reference"
    ) as model:
        assert torch.isfinite(model(IDS).logits).all()


def test_the_triton_backend_refuses(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    write_quantised(tmp_path, columns=8)
    message = r"multiplies 16 columns at a time, which must be in one group.*Found int8:8:f32"
    with pytest.raises(tpcompile.UnsupportedError, match=message):
        tpcompile.compile(str(tmp_path), backend="triton")


def test_the_triton_backend_continues_a_text(checkpoint: tuple[Path, Any]) -> None:
    pytest.importorskip("triton")
    directory, truth = checkpoint
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with tpcompile.compile(str(directory), backend="triton", max_seq_len=32) as model:
        tokens = model.generate(IDS[:1], **options)
        assert model.steps.program == 2
    assert tokens.tolist() == truth.generate(IDS[:1], **options).tolist()


def test_an_automatic_backend_says_why(tmp_path: Path) -> None:
    write_quantised(tmp_path, columns=16, intermediate_size=192)
    with pytest.warns(UserWarning, match="int8:16"):
        model = tpcompile.compile(str(tmp_path))
    with model:
        assert model.backend == MODULES
        assert model(IDS).logits.shape[:2] == IDS.shape


def test_a_model_in_memory(checkpoint: tuple[Path, Any]) -> None:
    config = type(checkpoint[1].config)(**checkpoint[1].config.to_dict())
    config.quantization_config = scheme(GROUP)
    model = type(checkpoint[1])(config).eval()
    with pytest.raises(tpcompile.UnsupportedError, match=r"is quantized.*directory"):
        tpcompile.compile(model)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "hqq"}, "quant_method.*'hqq'"),
    "another layout": ({"format": "marlin-24"}, "format.*'marlin-24'"),
    "integers as floats": ({"format": "float-quantized"}, r"weights\.type.*'int'.*'float' with"),
    "a mixture without formats": ({"format": "mixed-precision"}, r"config_groups\.format.*None"),
    "a quantised cache": ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "a rotation": ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "no groups": ({"config_groups": [1]}, "config_groups"),
    "groups of no modules": ({"config_groups": {"a": {"targets": "Linear"}}}, "targets"),
    "groups of numbers": ({"config_groups": {"a": {"targets": [1]}}}, "targets"),
    "a group without weights": ({"config_groups": {"a": {"targets": ["Linear"]}}}, "weights"),
    "embeddings": ({"config_groups": {"a": {"targets": ["Embedding"]}}}, "targets.*embed_tokens"),
    "no list of modules": ({"ignore": 7}, "ignore"),
    "no regular expression": ({"ignore": ["re:("]}, r"ignore.*regular expression"),
    "3 bits": ({"config_groups": scheme(16, num_bits=3)["config_groups"]}, r"weights\.num_bits"),
    "floats": ({"config_groups": scheme(16, type="float")["config_groups"]}, r"weights\.type"),
    "no size": ({"config_groups": scheme(16, group_size=None)["config_groups"]}, "group_size"),
    "a negative size": (
        {"config_groups": scheme(16, group_size=-16)["config_groups"]},
        "group_size",
    ),
    "a true size": ({"config_groups": scheme(16, group_size=True)["config_groups"]}, "group_size"),
    "a permutation": ({"config_groups": scheme(16, actorder="group")["config_groups"]}, "actorder"),
    "blocks": (
        {"config_groups": scheme(16, strategy="block", block_structure=[16])["config_groups"]},
        "block_structure",
    ),
    "offsets of blocks": (
        {
            "config_groups": scheme(
                16, strategy="block", block_structure=[16, 16], symmetric=False
            )["config_groups"]
        },
        r"weights\.symmetric",
    ),
    "another strategy": (
        {"config_groups": scheme(16, strategy="attn_head")["config_groups"]},
        "strategy",
    ),
    "groups that do not divide": ({"config_groups": scheme(48)["config_groups"]}, "group_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_schemes_that_are_not_read(checkpoint: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(tpcompile.UnsupportedError, match=message):
        capture(str(configured(checkpoint[0], tmp_path / "made", **changes)))


def test_rounded_activations_are_named(
    checkpoint: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(compressed.log, "warning", messages.append)
    groups = scheme(GROUP)["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8}
    capture(str(configured(checkpoint[0], tmp_path / "made", config_groups=groups)))
    assert messages == [
        "the scheme of the checkpoint also rounds activations, which tpcompile does with "
        "activations='int8' only"
    ]


FILES = {
    "no scales": ({f"{O_PROJ}_scale": None}, f"lacks the tensor {O_PROJ}_scale"),
    "scales of other groups": ({f"{O_PROJ}_scale": torch.ones(64, 6)}, "does not match"),
    "values in fp32": ({O_PROJ: torch.ones(64, 96)}, r"dtype that the configuration says.*F32"),
    "scales in int8": ({f"{O_PROJ}_scale": torch.ones(64, 3).to(torch.int8)}, "floating-point"),
    "scales of a plain weight": ({"lm_head.weight_scale": torch.ones(8, 1)}, "does not have"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_scheme(checkpoint: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    tensors, message = FILES[name]
    directory = rewritten(checkpoint[0], tmp_path / "made", **tensors)  # type: ignore[arg-type]
    with pytest.raises(tpcompile.CheckpointError, match=message):
        tpcompile.compile(str(directory), backend="torch")
