"""LoRA adapters that are merged while weights are read, against the models that peft merges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests.adapters import adapter, base_model, merged_model
from tests.models import TOLERANCE, relative_error
from tpcompile.compare.model import compare_with_eager
from tpcompile.passes import default_pipeline
from tpcompile.presets import preset
from tpcompile.runtime.adapter import LowRank, Merging
from tpcompile.runtime.adapter_config import _Config
from tpcompile.runtime.tensor_files import SafetensorsFiles
from tpcompile.serving import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("captured_once", "forked_launchers")

PRESETS = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EVERY = {"r": 5, "lora_alpha": 12, "target_modules": "all-linear"}
CONFIGS: dict[str, dict[str, Any]] = {
    "a list": {"r": 4, "lora_alpha": 6, "target_modules": LINEARS},
    "a regex": {"r": 3, "target_modules": r".*\.(q_proj|down_proj)"},
    "all linears": EVERY,
    "one layer": {"r": 4, "target_modules": LINEARS, "layers_to_transform": [1]},
    "rslora": {**EVERY, "use_rslora": True},
    "patterns": {
        **EVERY,
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 40, "up_proj": 3},
    },
}
IDS = torch.arange(3, 14)[None]


class Made:
    """A base model and its adapters in a directory of the session."""

    def __init__(self, directory: Path, name: str, dtype: torch.dtype) -> None:
        self.directory, self.dtype = directory, dtype
        self.base = base_model(AutoConfig.for_model(**preset(name)), directory / "base", dtype)

    @lru_cache(maxsize=8)  # noqa: B019
    def adapter(self, kind: str) -> Path:
        return adapter(self.base, self.directory / kind, **CONFIGS[kind])

    @lru_cache(maxsize=8)  # noqa: B019
    def merged(self, kind: str) -> Any:
        return merged_model(self.base, self.adapter(kind), self.dtype)


@pytest.fixture(scope="module")
def make_subject(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Made] = {}

    def of(name: str = "tiny-qwen3", dtype: torch.dtype = torch.float32) -> Made:
        if (name, dtype) not in known:
            known[name, dtype] = Made(tmp_path_factory.mktemp("adapted"), name, dtype)
        return known[name, dtype]

    return of


def differing(model: Any, merged: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the weights that differ from those of the model that peft has merged."""
    for name, parameter in merged.named_parameters():
        weight = model.gather_weight(name)
        assert weight.dtype == parameter.dtype
        if not torch.equal(weight, parameter):
            yield name, weight, parameter.detach()


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_numbers_are_those_of_merge_and_unload(make_subject: Any, kind: str, tp: int) -> None:
    subject = make_subject()
    expected = subject.merged(kind)
    with tpcompile.compile(
        str(subject.base), tp, simulate=True, adapter=subject.adapter(kind)
    ) as model:
        for name, weight, merged in differing(model, expected):
            assert (weight - merged).abs().max() <= 2**-22 * merged.abs().max(), name
        with torch.inference_mode():
            assert relative_error(model(IDS).logits, expected(IDS).logits) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESETS)
def test_every_family_and_dtype(make_subject: Any, name: str, dtype: torch.dtype) -> None:
    """Weights of 16 bits are peft's, but for the last bit of a few, whose sum is near a tie."""
    subject = make_subject(name, dtype)
    expected = subject.merged("all linears")
    with tpcompile.compile(
        str(subject.base), 3, simulate=True, adapter=subject.adapter("all linears"), backend="torch"
    ) as model:
        for key, weight, merged in differing(model, expected):
            apart, size = (weight - merged).abs().float(), merged.abs().float()
            step = torch.finfo(dtype).eps * size  # one rounding
            cancelled = 2**-21 * size.max()  # of sums in fp32 whose terms cancel
            assert bool((apart <= step + cancelled).all()), key
            assert dtype == torch.float32 or (apart > 0).float().mean() < 1e-3, key


def _weights(directory: Path, tp: int, **options: Any) -> Mapping[str, torch.Tensor]:
    with tpcompile.compile(str(directory), tp, simulate=True, **options) as model:
        return dict(model.state_dict())


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_those_of_every_tp(make_subject: Any, name: str) -> None:
    subject = make_subject(name, torch.bfloat16)
    path = subject.adapter("rslora")
    whole = _weights(subject.base, 1, adapter=path)
    for tp in (2, 3):
        for key, weight in _weights(subject.base, tp, adapter=path).items():
            assert torch.equal(weight, whole[key]), (tp, key)


def test_the_dtype_of_the_model_is_that_of_the_sum(make_subject: Any) -> None:
    """A base model in fp32 that is loaded in bf16 is rounded before the adapter is added."""
    subject = make_subject()
    path = subject.adapter("all linears")
    expected = merged_model(subject.base, path, torch.bfloat16)
    with tpcompile.compile(
        str(subject.base), 2, simulate=True, dtype="bfloat16", adapter=path
    ) as model:
        unlike = sum(int((a != b).sum()) for _, a, b in differing(model, expected))
    assert unlike <= 20


def test_a_rank_reads_only_its_slices(make_subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject()
    read: dict[str, set[tuple[int, int]]] = {}
    plain = SafetensorsFiles.read

    def watched(self: Any, name: str, index: Any) -> torch.Tensor:
        tensor = plain(self, name, index)
        if "lora_" in name:
            read.setdefault(name, set()).add(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(SafetensorsFiles, "read", watched)
    with tpcompile.compile(
        str(subject.base), 2, simulate=True, adapter=subject.adapter("a list")
    ) as model:
        config = model.config
    wide, inner = config.hidden_size, config.intermediate_size
    rows = {shape for name, shapes in read.items() if "up_proj.lora_B" in name for shape in shapes}
    columns = {
        shape for name, shapes in read.items() if "down_proj.lora_A" in name for shape in shapes
    }
    assert max(shape[0] for shape in rows) < inner  # column-parallel: rows of B
    assert max(shape[1] for shape in columns) < inner  # row-parallel: columns of A
    assert {shape for name, s in read.items() if "up_proj.lora_A" in name for shape in s} == {
        (4, wide)
    }


def _unscaled(self: _Config, module: str) -> float:
    return self.alpha


def _plain_scale(self: _Config, module: str) -> float:
    return self.alpha / self.rank_of(module)


def _broken_merge(change: Any) -> Any:
    plain = Merging.__call__

    def merged(self: Merging, name: str, index: Any) -> torch.Tensor:
        added = self._added
        if name in added:
            self._added = {**added, name: change(added, name)}
        try:
            return plain(self, name, index)
        finally:
            self._added = added

    return merged


def _other_layer(added: Mapping[str, LowRank], name: str) -> LowRank:
    other = name.replace("layers.0", "layers.1")
    return replace(added[name], a=added[other].a)


def _from_zero(side: str, dim: int) -> Any:
    """Return a reader that forgets where a rank's slice of A or B begins."""
    plain = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if f"lora_{side}" in name:
            extents = [part.stop - part.start for part in index]
            index = (*index[:dim], slice(0, extents[dim]), *index[dim + 1 :])
        return plain(self, name, index)

    return read


MISTAKES = {
    "alpha is not divided by r": ("a list", _Config, "scale_of", _unscaled),
    "the scale of plain LoRA": ("rslora", _Config, "scale_of", _plain_scale),
    "A of another layer": ("a list", Merging, "__call__", _broken_merge(_other_layer)),
    "the first columns of A": ("a list", SafetensorsFiles, "read", _from_zero("A", 1)),
    "the first rows of B": ("a list", SafetensorsFiles, "read", _from_zero("B", 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_the_logits(
    make_subject: Any, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, place, name, wrong = MISTAKES[mistake]
    subject = make_subject()
    expected = subject.merged(kind)
    monkeypatch.setattr(place, name, wrong)
    with (
        tpcompile.compile(
            str(subject.base), 2, simulate=True, adapter=subject.adapter(kind)
        ) as model,
        torch.inference_mode(),
    ):
        assert relative_error(model(IDS).logits, expected(IDS).logits) > 100 * TOLERANCE


@pytest.mark.parametrize("weights", ["int8", "int4:32"])
def test_it_is_merged_before_weights_are_quantized(
    make_subject: Any, tmp_path: Path, weights: str
) -> None:
    subject = make_subject(dtype=torch.bfloat16)
    path = subject.adapter("all linears")
    whole = tmp_path / "merged"
    with tpcompile.compile(str(subject.base), 1, simulate=True, adapter=path) as model:
        model.save_pretrained(whole)
    expected = _weights(whole, 1, weights=weights)
    for key, weight in _weights(subject.base, 2, weights=weights, adapter=path).items():
        assert torch.equal(weight, expected[key]), key


def test_a_saved_model_is_the_merged_one(make_subject: Any, tmp_path: Path) -> None:
    subject = make_subject()
    with tpcompile.compile(
        str(subject.base), 2, simulate=True, adapter=subject.adapter("all linears")
    ) as model:
        model.save_pretrained(tmp_path / "saved")
        logits = model(IDS).logits
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    with torch.inference_mode():
        assert relative_error(logits, again.eval()(IDS).logits) < TOLERANCE


def test_ranks_in_processes_and_again(make_subject: Any) -> None:
    """Real ranks merge their own parts, and so do those that are started again."""
    subject = make_subject()
    expected = subject.merged("all linears")
    with (
        tpcompile.compile(
            str(subject.base), 2, adapter=subject.adapter("all linears"), backend="torch"
        ) as model,
        torch.inference_mode(),
    ):
        assert relative_error(model(IDS).logits, expected(IDS).logits) < TOLERANCE
        assert model.made_by is not None
        with model.made_by(tp=3) as again:
            assert relative_error(again(IDS).logits, expected(IDS).logits) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_in_memory(make_subject: Any, tp: int) -> None:
    subject = make_subject()
    expected = subject.merged("all linears")
    model = AutoModelForCausalLM.from_pretrained(subject.base).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with (
        tpcompile.compile(
            model, tp, adapter=subject.adapter("all linears"), backend="torch"
        ) as compiled,
        torch.inference_mode(),
    ):
        assert relative_error(compiled(IDS).logits, expected(IDS).logits) < TOLERANCE
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("in_memory", [False, True])
def test_compare_merges_it_into_eager_too(make_subject: Any, in_memory: bool) -> None:
    subject = make_subject()
    model = str(subject.base)
    if in_memory:
        model = AutoModelForCausalLM.from_pretrained(subject.base).eval()
    comparison = compare_with_eager(
        model, default_pipeline(3), adapter=subject.adapter("all linears"), simulate=True
    )
    assert comparison.ok, comparison.table()


def test_shared_prefixes_end_with_the_adapter(make_subject: Any) -> None:
    """After a restart with another adapter, no block holds keys and values of the one before."""
    subject = make_subject()
    first, second = (subject.adapter(kind) for kind in ("all linears", "rslora"))
    prompt = [*range(5, 105)]
    how = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = {}
    for path in (first, second):
        with tpcompile.compile(str(subject.base), max_seq_len=160, adapter=path) as model:
            ids = torch.tensor([prompt])
            tokens = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
            expected[path] = tokens[0, len(prompt) :].tolist()
    assert expected[first] != expected[second]
    with (
        tpcompile.compile(str(subject.base), max_seq_len=160, adapter=first) as model,
        Engine(model, max_batch=4, chunk=32, max_tokens_per_step=64) as engine,
    ):
        assert engine.add(prompt, how).result()[0].tokens == expected[first]
        assert engine.add(prompt, how).result()[0].tokens == expected[first]
        engine.restart(adapter=second)
        assert engine.add(prompt, how).result()[0].tokens == expected[second]
        engine.restart(tp=2)
        assert engine.add(prompt, how).result()[0].tokens == expected[second]
