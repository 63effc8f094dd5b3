"""The demo model is an ordinary checkpoint, deterministic in its seed, that writes sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

import tpcompile
from tests.models import TOLERANCE, relative_error
from tpcompile.demo import model as module
from tpcompile.demo.model import ARCHITECTURES, VOCABULARY, demo_tokenizer, make_demo
from tpcompile.demo.text import PEOPLE, all_sentences, documents, friend_of
from tpcompile.errors import UsageError

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPTS = ("Anna is", "One rainy morning Felix", "The grey cat of")
FEW = 10
FEW_BITS = ("int4:32", "int4:64", "int8:row", "int8")
TOKENS = 64
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@dataclass(frozen=True)
class Few:
    """A demo model trained for a few steps, and its reported progress."""

    directory: Path
    loss: float
    told: list[tuple[str, int, float]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Few:
    directory, told = tmp_path_factory.mktemp("demo") / "few", []
    loss = make_demo(directory, 3, FEW, lambda *progress: told.append(progress))
    return Few(directory, loss, told)


@pytest.fixture
def few(demo: Few) -> Path:
    return demo.directory


def _loaded(directory: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, attn_implementation="eager"
    )
    return tokenizer, model.eval()


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _greedy(model: Any, ids: torch.Tensor, tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """Return greedy tokens and logits, without a cache."""
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for _ in range(tokens):
            logits.append(model(ids).logits[0, -1])
            ids = torch.cat([ids, logits[-1].argmax()[None, None]], dim=1)
    return ids[0, -tokens:].tolist(), logits


def test_a_normal_checkpoint(few: Path) -> None:
    names = {path.name for path in few.iterdir()}
    assert names == {*FILES, "draft"}
    tokenizer, model = _loaded(few)
    config = model.config
    assert type(model) is Qwen3ForCausalLM
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert "lm_head.weight" not in _tensors(few)
    assert config.vocab_size == len(tokenizer) == VOCABULARY
    assert all(VOCABULARY % tp for tp in range(2, 9))
    for settings in (config, model.generation_config):
        assert settings.eos_token_id == tokenizer.eos_token_id
        assert settings.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_generate_and_padding(few: Path) -> None:
    tokenizer, model = _loaded(few)
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    assert set(batch) == {"input_ids", "attention_mask"}
    generated = model.generate(**batch, max_new_tokens=4, min_new_tokens=4)
    assert generated.shape == (len(PROMPTS), batch["input_ids"].shape[1] + 4)


@pytest.mark.parametrize("text", ["Anna is a baker.", "Zoë's 3 naïve\n\tcafés… 漢字 🙂", ""])
def test_any_text_comes_back(few: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(few, local_files_only=True)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("tools", [False, True])
def test_a_seed_gives_the_same_files(tmp_path: Path, tools: bool) -> None:
    state = torch.get_rng_state()
    directories = {name: tmp_path / name for name in ("one", "same", "other")}
    for name, directory in directories.items():
        make_demo(directory, seed=4 if name == "other" else 3, steps=1, tools=tools)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (path for path in directories["one"].rglob("*") if path.is_file()):
        same = directories["same"] / path.relative_to(directories["one"])
        assert path.read_bytes() == same.read_bytes(), path
    first, other = _tensors(directories["one"]), _tensors(directories["other"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], other[name])


def test_training_is_told_and_learns(demo: Few) -> None:
    expected = [(part, done) for part in ("model", "draft") for done in range(1, FEW + 1)]
    assert [(part, done) for part, done, _ in demo.told] == expected
    losses = [loss for *_, loss in demo.told]
    assert losses[FEW - 1] == demo.loss < losses[0] - 0.5
    assert losses[-1] < losses[FEW] - 0.2


def test_the_draft_is_a_tenth_of_the_model_and_has_its_tokenizer(few: Path) -> None:
    draft = few / "draft"
    assert {path.name for path in draft.iterdir()} == FILES
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (draft / name).read_bytes() == (few / name).read_bytes()
    sizes = [sum(map(torch.numel, _tensors(directory).values())) for directory in (few, draft)]
    assert 0.09 < sizes[1] / sizes[0] < 0.11
    assert type(_loaded(draft)[1]) is Qwen3ForCausalLM


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_compiled_equals_eager(few: Path, tp: int) -> None:
    tokenizer, eager = _loaded(few)
    with tpcompile.compile(str(few), tp=tp, simulate=True) as model:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            expected, eager_logits = _greedy(eager, ids, 12)
            tokens, logits = _greedy(model, ids, 12)
            assert tokens == expected, prompt
            assert relative_error(torch.stack(logits), torch.stack(eager_logits)) < TOLERANCE


@pytest.mark.parametrize(
    ("arch", "kind", "setting", "value"),
    [
        (
            "qwen3.5",
            Qwen3_5ForCausalLM,
            "layer_types",
            ["linear_attention"] * 3 + ["full_attention"],
        ),
        ("qwen3-moe", Qwen3MoeForCausalLM, "num_experts", 6),
    ],
)
def test_a_demo_of_another_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    kind: type,
    setting: str,
    value: Any,
) -> None:
    told: list[float] = []
    monkeypatch.setattr(module, "SHAPES", ((4, 64),))  # short rows are enough
    make_demo(tmp_path, 3, 5, lambda *progress: told.append(progress[-1]), arch)
    assert told[4] < told[0]
    tokenizer, eager = _loaded(tmp_path)
    assert type(eager) is kind
    assert getattr(eager.config, setting) == value
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    expected, eager_logits = _greedy(eager, ids, 6)
    with tpcompile.compile(str(tmp_path), tp=2, simulate=True) as model:
        tokens, logits = _greedy(model, ids, 6)
    assert tokens == expected
    assert relative_error(torch.stack(logits), torch.stack(eager_logits)) < TOLERANCE


def _check_quantized(directory: Path, quantized: Path, weights: str) -> None:
    """Compare the native tokens of the quantized checkpoint with those of transformers."""
    tpcompile.quantize(str(directory), weights, quantized)
    tokenizer, eager = _loaded(quantized)
    with tpcompile.compile(str(quantized), backend="native") as model:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            expected = eager.generate(ids, max_new_tokens=TOKENS, do_sample=False)
            before = model.steps.program
            generated = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
            assert generated.tolist() == expected.tolist(), prompt
            assert model.steps.program - before == generated.shape[1] - ids.shape[1] - 1 > 0


@pytest.mark.parametrize("weights", FEW_BITS)
def test_native_tokens_of_few_bits_equal_those_of_transformers(
    few: Path, tmp_path: Path, weights: str
) -> None:
    _check_quantized(few, tmp_path / "made", weights)


@pytest.mark.slow
def test_and_so_does_text(tmp_path: Path) -> None:
    make_demo(tmp_path / "demo")
    for weights in FEW_BITS:
        _check_quantized(tmp_path / "demo", tmp_path / weights, weights)


def test_stories() -> None:
    known = set(all_sentences())
    assert all(set(document) <= known for document in islice(documents(1), 50))
    assert [*islice(documents(1), 3)] == [*islice(documents(1), 3)] != [*islice(documents(2), 3)]


def test_everybody_has_a_turn() -> None:
    """The chain of friends reaches all people of the village."""
    met = [0]
    while friend_of(met[-1]) not in met:
        met.append(friend_of(met[-1]))
    assert sorted(met) == list(range(len(PEOPLE)))


def test_words_are_tokens() -> None:
    tokenizer = demo_tokenizer()
    text = " ".join(next(documents(1)))
    assert len(tokenizer(text)["input_ids"]) == len(re.findall(r"\w+|[.,]", text))


def test_refusals_come_before_training(tmp_path: Path) -> None:
    def trained(part: str, done: int, loss: float) -> None:
        raise AssertionError("it trained")

    with pytest.raises(UsageError, match="steps must be at least 1, got 0"):
        make_demo(tmp_path / "new", steps=0, follow=trained)
    with pytest.raises(
        UsageError, match=r"arch must be one of qwen3, qwen3-moe, qwen3\.5, got 'qwen4'"
    ):
        make_demo(tmp_path / "new", follow=trained, arch="qwen4")
    (tmp_path / "mine").write_text("mine")
    for directory, message in ((tmp_path, "is not empty"), (tmp_path / "mine", "Found a file")):
        with pytest.raises(UsageError, match=message):
            make_demo(directory, follow=trained)
    with pytest.raises(UsageError, match="cannot be written"):
        make_demo(tmp_path / "mine" / "below", follow=trained)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SafetensorError, OSError(28, "full")])
def test_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, error: Any
) -> None:
    save = Qwen3ForCausalLM.save_pretrained

    def broken(self: Any, directory: Path, **options: Any) -> None:
        save(self, directory, **options)
        raise error

    monkeypatch.setattr(Qwen3ForCausalLM, "save_pretrained", broken)
    target = tmp_path / "above" / "demo"
    if there:
        target.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else UsageError):
        make_demo(target, steps=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_while_files_are_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, placed = Path.rename, []

    def broken(self: Path, target: Path) -> Path:
        placed.append(rename(self, target))
        if len(placed) == 3:
            raise KeyboardInterrupt
        return placed[-1]

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(KeyboardInterrupt):
        make_demo(tmp_path, steps=1)
    assert len(placed) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_text_is_sentences_of_the_grammar(tmp_path: Path, arch: str) -> None:
    """Greedy text consists of sentences of the grammar, and equals that of two compiled ranks."""
    make_demo(tmp_path / "demo", arch=arch)
    tokenizer, eager = _loaded(tmp_path / "demo")
    known = set(all_sentences())
    with tpcompile.compile(str(tmp_path / "demo"), tp=2, simulate=True) as model:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            tokens, _ = _greedy(eager, ids, 64)
            assert _greedy(model, ids, 64)[0] == tokens
            text = prompt + tokenizer.decode(tokens, skip_special_tokens=True)
            sentences = re.findall(r"[A-Z][^.]*\.", text)
            assert len(sentences) >= 4
            assert set(sentences) <= known
