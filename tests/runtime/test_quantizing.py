"""Weights that are quantized while they are loaded: components, reads, ranks and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once as capture
from tests.models import TOLERANCE, relative_error
from tests.quantized import rewritten, write_quantised
from tpcompile.compare.model import compare_with_eager
from tpcompile.frontend import Captured
from tpcompile.frontend import capture as capture_anew
from tpcompile.frontend.quantizing import quantized_config
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.pieces import Read, evaluate
from tpcompile.ir.quantize import quantized
from tpcompile.ir.scheme import Scheme
from tpcompile.options import scheme_of
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.presets import preset
from tpcompile.runtime import quantizing
from tpcompile.runtime.quantizing import Quantizing
from tpcompile.runtime.weights import ModelWeights, opened, weights_of

pytestmark = pytest.mark.usefixtures("captured_once")
IDS = torch.arange(1, 25).reshape(2, 12)
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 144,
}
"""Two ranks cut the columns of o_proj at 64, and three at 32 and 64: within groups of 48."""


def made_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**preset("tiny-qwen3"), **SIZES, **changes})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # neighbouring groups have other scales
            if parameter.dim() == 2:
                rows, columns = parameter.shape
                place = torch.arange(rows)[:, None] + torch.arange(columns) // 16
                parameter.mul_(1 + place % 3)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return made_model()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    model.save_pretrained(path)
    return path


def _whole(captured: Captured, model: Any) -> Read:
    """Return the components of weights that are quantized as a whole."""
    plain = ModelWeights(model)
    values = dict(model.named_parameters(remove_duplicate=False))
    held = {}
    for name in captured.quantized:
        stored = captured.tensors[name].format
        assert stored is not None
        for suffix, tensor in quantized(values[name].detach(), stored).items():
            held[name + suffix] = tensor
    return lambda name, index: held[name][index] if name in held else plain(name, index)


def _differ(model: Any, scheme: Scheme, tp: int) -> list[str]:
    """Return the parameters of ranks that are not parts of the whole components."""
    captured = capture(model, scheme=scheme)
    read, whole = weights_of(captured, model, None), _whole(captured, model)
    assert isinstance(read, Quantizing)
    graph, _ = run_passes(captured.graph, default_pipeline(tp))
    wrong = []
    for node in parameters(graph.graph):
        for rank in range(tp):
            for part, recipe in parameter_of(node).components(rank):
                if not torch.equal(evaluate(recipe, read), evaluate(recipe, whole)):
                    wrong.append(f"{node.target}{part.suffix} of rank {rank}")
    assert not read._pending, "scales that no rank read"
    return wrong


SCHEMES = [("int4:48", None), ("int4:16", "int4"), ("int8:48", "keep"), ("int8:row", None)]


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(("weights", "head"), SCHEMES)
def test_components_are_those_of_every_tp(
    model: Any, weights: str, head: str | None, tp: int
) -> None:
    scheme = scheme_of(weights, head)
    assert scheme is not None
    assert not _differ(model, scheme, tp)


def test_rows_that_end_within_a_word() -> None:
    scheme = scheme_of("int4:row", "int8")
    assert scheme is not None
    assert not _differ(made_model(hidden_size=90, intermediate_size=150), scheme, 3)


Groups = Callable[..., tuple[int, int]]


def _from_first_column(groups: Groups) -> Groups:
    def changed(item: Any, part: Any, wanted: slice) -> tuple[int, int]:
        size = part.columns or item.weight.shape[1]
        return wanted.start * size, min(wanted.stop * size, item.weight.shape[1])

    return changed


def _cut_short(groups: Groups) -> Groups:
    def changed(item: Any, part: Any, wanted: slice) -> tuple[int, int]:
        start, stop = groups(item, part, wanted)
        return start, max(stop - 16, start + 16)

    return changed


def _next_group(groups: Groups) -> Groups:
    def changed(item: Any, part: Any, wanted: slice) -> tuple[int, int]:
        start, stop = groups(item, part, wanted)
        size = item.stored.components[1].columns
        whole = item.weight.shape[1]
        return (
            (start + size, stop + size) if part.suffix and stop + size <= whole else (start, stop)
        )

    return changed


@pytest.mark.parametrize("mutant", [_from_first_column, _cut_short, _next_group])
def test_mistakes_at_cut_groups_are_noticed(
    model: Any, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Groups], Groups]
) -> None:
    monkeypatch.setattr(quantizing, "_whole_groups", mutant(quantizing._whole_groups))
    scheme = scheme_of("int4:48")
    assert scheme is not None
    try:
        wrong = _differ(model, scheme, 2)
    except (AssertionError, RuntimeError):  # other shapes
        return
    assert any("o_proj" in name for name in wrong)


def test_a_rank_reads_the_columns_of_its_groups(model: Any) -> None:
    captured = capture(model, scheme=scheme_of("int4:48"))
    read = weights_of(captured, model, None)
    assert isinstance(read, Quantizing)
    indices: list[tuple[slice, ...]] = []
    inner = read._read

    def watched(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        indices.append(index)
        return inner(name, index)

    read._read = watched
    graph, _ = run_passes(captured.graph, default_pipeline(2))
    weight = next(n for n in parameters(graph.graph) if str(n.target) == "l0_o_proj_weight")
    for rank, columns in ((0, slice(0, 96)), (1, slice(48, 96))):  # cut at 64
        indices.clear()
        for _, recipe in parameter_of(weight).components(rank):
            evaluate(recipe, read)
        assert indices == [(slice(0, 96), columns)]


def test_blocks_of_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a block changes no bit."""
    name, pairs = "model.layers.0.mlp.up_proj.weight", []
    captured = capture(model, scheme=scheme_of("int4:16"))
    for size in (1, 1000, 1 << 18):
        monkeypatch.setattr(quantizing, "_ELEMENTS", size)
        read: Any = weights_of(captured, model, None)
        values = read(f"{name}_packed", (slice(0, 144), slice(0, 12)))
        pairs.append((values, read(f"{name}_scale", (slice(0, 144), slice(0, 6)))))
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(pair, pairs[0], strict=True))


def dequantised(model: Any, captured: Captured) -> Any:
    """Return Hugging Face's model with the values that the components stand for."""
    eager = copy.deepcopy(model)
    if any(name != source for name, source in captured.quantized.items()):
        eager.lm_head.weight = torch.nn.Parameter(eager.lm_head.weight.detach().clone())
    whole = _whole(captured, model)
    with torch.no_grad():
        for name in captured.quantized:
            tensor = captured.tensors[name]
            assert tensor.format is not None
            columns = tensor.shape[1]
            parts = {
                component.suffix: whole(name + component.suffix, (slice(None), slice(None)))
                for component in tensor.format.components
            }
            values = tensor.format.decoded(parts, (0, columns), torch.float32)
            eager.get_parameter(name).copy_(values)
    return eager


@pytest.mark.parametrize(
    ("weights", "head", "tied"),
    [("int4:48", None, True), ("int4:16", "int4", False), ("int8:48", "keep", True)],
)
def test_logits(model: Any, weights: str, head: str | None, tied: bool) -> None:
    """A tied head is untied: the embedding stays as it is, also in the user's model."""
    source = model if tied else made_model(tie_word_embeddings=False)
    before = copy.deepcopy(source.state_dict())
    captured = capture(source, scheme=scheme_of(weights, head))
    with torch.no_grad():
        wanted = dequantised(source, captured)(IDS).logits
    for tp in (1, 2):
        with tpcompile.compile(
            source, tp=tp, weights=weights, head=head, simulate=True, backend="torch"
        ) as compiled:
            assert relative_error(compiled(IDS).logits, wanted) < TOLERANCE
            embedding = compiled.gather_weight("model.embed_tokens.weight")
            assert torch.equal(embedding, source.model.embed_tokens.weight)
            tied_now = tied and head == "keep"
            assert compiled.config.tie_word_embeddings == tied_now
            assert compiled.config is not source.config
    assert source.config.tie_word_embeddings == tied
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


def test_decode_steps_on_ranks_in_processes(directory: Path) -> None:
    """Workers quantize their own parts of the files."""
    options: dict[str, Any] = {"weights": "int4:48", "backend": "reference"}
    tokens = []
    for more in ({"tp": 1}, {"tp": 2}, {"tp": 2, "simulate": True}):
        with tpcompile.compile(str(directory), **options, **more) as compiled:
            ids = compiled.generate(IDS[:, :5], max_new_tokens=4, do_sample=False)
            assert compiled.steps.program
            tokens.append(ids)
    assert all(torch.equal(ids, tokens[0]) for ids in tokens)


def test_columns_that_are_not_whole_groups(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    captured = capture_anew(model, scheme=scheme_of("int4:64"))
    formats = {
        str(tensor.format) for tensor in captured.tensors.values() if tensor.format is not None
    }
    assert formats == {"int4:row:f32", "int8:row:f32"}
    assert (
        "get a scale per row, since their columns are not a multiple of 64"
        in capsys.readouterr().err
    )


def test_random_weights_are_made_in_few_bits() -> None:
    logits = []
    for tp in (1, 3):
        with tpcompile.compile(
            "preset:tiny-qwen3", tp=tp, random_weights=2, weights="int4:16", simulate=True,
            backend="torch",
        ) as model:  # fmt: skip
            logits.append(model(IDS).logits)
            packed = model.gather_weight("model.layers.0.mlp.up_proj.weight_packed")
            assert packed.dtype == torch.int32 and len(packed.unique()) > 500
    assert relative_error(*logits) < TOLERANCE


def test_comparison_with_eager(model: Any) -> None:
    """Eager has the dequantised weights, not those of the model in memory."""
    for source in (model, made_model(torch.bfloat16)):
        comparison = compare_with_eager(
            source,
            default_pipeline(2),
            scheme=scheme_of("int4:48"),
            lengths=(5, 3),
            simulate=True,
        )
        assert comparison.ok, comparison.table()


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    write_quantised(tmp_path / "quantised")
    return tmp_path / "quantised"


def test_a_quantised_checkpoint_is_refused(quantised: Path) -> None:
    with pytest.raises(
        tpcompile.UsageError, match=r"quantized already.*'int4:32'.*Omit weights.*original"
    ):
        tpcompile.compile(str(quantised), weights="int4:32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int5"}, "weights must be int8 or int4.*got 'int5'"),
        ({"weights": "int4:20"}, "a multiple of 16.*got 'int4:20'"),
        ({"weights": "int4:0"}, "weights must be"),
        ({"weights": 4}, "weights must be.*got 4"),
        ({"head": "int8"}, "head applies to weights that are quantized.*Add weights="),
        ({"weights": "int4", "head": "int2"}, "head must be one of int8, int4, keep.*'int2'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tpcompile.UsageError, match=message):
        tpcompile.compile("preset:tiny-qwen3", random_weights=0, **options)
    with pytest.raises(tpcompile.UsageError, match=message):
        tpcompile.schedule("preset:tiny-qwen3", target="cpu", **options)


def test_layers_without_linears() -> None:
    """The head alone is not quantized."""
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    make: Any = AutoModelForCausalLM.from_config
    gpt2 = make(AutoConfig.for_model("gpt2", **sizes, **ends))
    scheme = scheme_of("int4:16")
    assert scheme is not None
    with pytest.raises(tpcompile.UnsupportedError, match=r"can be quantized.*no linears"):
        quantized_config(gpt2, "transformer.h", scheme)


def test_values_that_are_not_finite(directory: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(directory / "model.safetensors")[name]
    weight[100, 3] = torch.nan
    target = rewritten(directory, tmp_path / "made", **{name: weight})
    with pytest.raises(tpcompile.CheckpointError, match=rf"{name} cannot be quantized"):
        tpcompile.compile(str(target), weights="int4:48", backend="torch")


def test_a_head_that_is_stored_twice(directory: Path, tmp_path: Path) -> None:
    """Tied tensors that differ are refused as without quantization."""
    stored = load_file(directory / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    target = tmp_path / "made"
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    save_file({**stored, "lm_head.weight": embedding.clone()}, target / "model.safetensors")
    with tpcompile.compile(str(target), weights="int8:48", backend="torch") as compiled:
        assert compiled(IDS).logits.isfinite().all()
    save_file({**stored, "lm_head.weight": embedding + 1}, target / "model.safetensors")
    with pytest.raises(tpcompile.CheckpointError, match="tied, but are stored with different"):
        tpcompile.compile(str(target), weights="int8:48", backend="torch")


def test_opened_files_are_quantized(directory: Path) -> None:
    captured = capture(str(directory), scheme=scheme_of("int8:48"))
    with opened(weights_of(captured, str(directory), None)) as read:
        rows = read("lm_head.weight", (slice(0, 7), slice(0, 96)))
    assert rows.dtype == torch.int8 and rows.shape == (7, 96)
