"""A side continues its sequences, one token or one prompt at a time, like eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.checkpoint import RandomCheckpoint, write_checkpoint
from benchmarks.decode import FEW_BITS as LIMITS
from benchmarks.peers.hugging_face import eager
from benchmarks.peers.kinds import KINDS, Loaded, Settings, Sizes
from benchmarks.peers.worker import Result, Runner
from tests.gguf_files import model_of, write_gguf

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [19, 18, 17, 16, 15, 14, 13]]
MORE = [[1, 2, 3], [3, 2, 1]]
PACKAGES = {"llama.cpp": ["llama_cpp", "gguf"], "openvino": ["openvino", "optimum.intel"]}
FILE_PACKAGES = {"llama.cpp": ["llama_cpp", "gguf"], "openvino": ["openvino_genai"]}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [f"t{token}" for token in range(1013)],
    "tokenizer.ggml.token_type": [1] * 1013,
    "tokenizer.ggml.merges": ["t 0"],
    "tokenizer.ggml.eos_token_id": 0,
}
"""A vocabulary, without which peers load no file."""
FEW_BITS = {"llama.cpp": [], "openvino": ["nncf"]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny-qwen3")


def _settings(tiny: RandomCheckpoint, weights: str = "") -> Settings:
    return Settings(str(tiny.directory), 1, 1, largest_batch=2, weights=weights)


def _logits(result: Result) -> Any:
    shape, numbers = result[1]
    return np.frombuffer(numbers, np.float32).reshape(shape)


def test_a_runner_continues_its_sequences(tiny: RandomCheckpoint) -> None:
    loaded = eager(_settings(tiny))
    runner = Runner(loaded.model)
    first = runner.prefill(PROMPTS, 10)
    steps = runner.decode(MORE)
    rows = torch.tensor([[*prompt, *more] for prompt, more in zip(PROMPTS, MORE, strict=True)])
    with torch.inference_mode():
        expected = loaded.model._model(rows).logits.numpy()  # type: ignore[attr-defined]
    assert len(first[0]) == 1 and len(steps[0]) == 3 and min(steps[0]) > 0
    np.testing.assert_allclose(_logits(first), expected[:, 6], atol=1e-5)
    np.testing.assert_allclose(_logits(steps), expected[:, -1], atol=1e-5)
    again = runner.prefill(PROMPTS[:1], 10)  # new sequences do not see the old ones
    np.testing.assert_allclose(_logits(again), expected[:1, 6], atol=1e-5)


def _checked(loaded: Loaded, expected: Loaded, limit: float = 1e-5) -> None:
    for batch in (1, 2):
        for _ in range(2):  # the second time with what the first has prepared
            results = []
            for runner in (Runner(loaded.model), Runner(expected.model)):
                first = _logits(runner.prefill(PROMPTS[:batch], 32))
                results.append([first, _logits(runner.decode(MORE[:batch]))])
            actual, reference = (np.stack(result) for result in results)
            assert actual.shape == (2, batch, 1013)
            assert np.abs(actual - reference).max() < limit * np.abs(reference).max()


@pytest.mark.parametrize("kind", ["tpcompile", "tpcompile-native"])
def test_agrees_with_eager(tiny: RandomCheckpoint, kind: str) -> None:
    _checked(KINDS[kind].load(_settings(tiny)), eager(_settings(tiny)))


@pytest.mark.parametrize("kind", ["eager", "tpcompile", "tpcompile-native"])
def test_sizes(tiny: RandomCheckpoint, kind: str) -> None:
    loaded = KINDS[kind].load(_settings(tiny))
    token = 2 * 2 * 2 * 16 * 4  # keys and values of two layers and two heads in fp32
    assert loaded.sizes == Sizes(tiny.weight_bytes, tiny.weight_bytes, token)
    loaded.close()


@pytest.mark.parametrize("weights", ["int8:32", "int4:row"])
def test_weights_in_few_bits(tiny: RandomCheckpoint, weights: str) -> None:
    modules, native = (
        KINDS[kind].load(_settings(tiny, weights)) for kind in ("tpcompile", "tpcompile-native")
    )
    _checked(native, modules)
    assert modules.sizes == native.sizes and native.sizes is not None
    embedding = 1013 * 64 * 4  # not tied any more: a step reads only rows of it
    assert native.sizes.held - native.sizes.read == embedding
    bits = 8 * native.sizes.read / tiny.weights_read
    assert 4 < bits < (9.5 if weights == "int8:32" else 8)
    native.close()
    modules.close()


@pytest.mark.slow
def test_torch_compile_agrees_with_eager(tiny: RandomCheckpoint) -> None:
    """Inductor takes about a minute per size."""
    _checked(KINDS["torch-compile"].load(_settings(tiny)), eager(_settings(tiny)))


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_peer_agrees_with_eager(tiny: RandomCheckpoint, kind: str) -> None:
    for package in PACKAGES[kind]:
        pytest.importorskip(package, reason=f"{KINDS[kind].packages} are not installed here")
    _checked(KINDS[kind].load(_settings(tiny)), eager(_settings(tiny)))


@pytest.mark.parametrize("kind", [*PACKAGES, "tpcompile", "tpcompile-native"])
def test_a_side_reads_a_gguf_file(tmp_path: Path, kind: str) -> None:
    for package in FILE_PACKAGES.get(kind, []):
        pytest.importorskip(package, reason=f"{KINDS[kind].packages} are not installed here")
    model = write_gguf(tmp_path / "m.gguf", model_of(vocab_size=1013), more=TOKENIZER)
    model.save_pretrained(tmp_path / "hf")
    settings = Settings(str(tmp_path / "m.gguf"), 1, 1, largest_batch=2)
    loaded = KINDS[kind].load(settings)
    _checked(loaded, eager(Settings(str(tmp_path / "hf"), 1, 1)), LIMITS["int8"] * 3**0.5)
    assert loaded.sizes is not None
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 8 < 8 * loaded.sizes.read / weights < 10
    loaded.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_peer_in_eight_bits(tiny: RandomCheckpoint, kind: str) -> None:
    for package in [*PACKAGES[kind], *FEW_BITS[kind]]:
        pytest.importorskip(package, reason=f"{KINDS[kind].packages} are not installed here")
    loaded = KINDS[kind].load(_settings(tiny, "int8"))
    _checked(loaded, eager(_settings(tiny)), LIMITS["int8"] * 3**0.5)
    assert loaded.sizes is not None
    assert 8 < 8 * loaded.sizes.read / tiny.weights_read < 10


def test_every_kind_exists() -> None:
    for kind in KINDS.values():
        module, _, name = kind.function.partition(":")
        source = Path(*module.split(".")).with_suffix(".py").read_text()
        assert f"def {name}(settings: Settings) -> Loaded:" in source
