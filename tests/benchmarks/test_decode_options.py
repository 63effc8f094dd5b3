"""Options of the decode benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.decode_measured import EAGER, LLAMA, NATIVE, OPENVINO
from benchmarks.decode_options import PEER_KINDS, parse
from tests.gguf_files import model_of, write_gguf
from tpcompile.presets import preset


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sides", "nobody"], "--sides matches no side"),
        (["--steps", "0"], "must be at least 1"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--weights", "int5"], "weights must be"),
        (["--head", "int4"], "head applies to weights"),
        (["--activations", "int8"], "pass --weights"),
        (["--weights", "int4", "--head", "int5"], "invalid choice: 'int5'"),
        (["--at-once", "1"], "--at-once must be at least 2"),
        (["--from", "/no/such/file"], "must hold results of --json: FileNotFoundError"),
        (["nothing.gguf"], "'nothing.gguf' is neither a GGUF file nor a directory"),
        (["--peer-python", "eager=python"], "must start with one of"),
        (["--peer-python", "llama.cpp=/no/such/file"], "is not an executable file"),
    ],
)
def test_bad_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(options, None)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_weights_in_few_bits() -> None:
    chosen = parse(["--weights", "int8", "int4:32", "int4", "--head", "int4"], None).chosen
    few = {spec.name: spec for spec in chosen if spec.weights}
    assert len(few) == 2 * 2 + 3 * 4  # two peers for each number of bits, and tpcompile's sides
    assert few["llama.cpp Q4_0"].weights == "int4" and few["OpenVINO int8"].weights == "int8"
    native = few[f"{NATIVE} int4:32"]
    assert (native.kind, native.tp, native.weights, native.head) == (
        "tpcompile-native",
        1,
        "int4:32",
        "int4",
    )


def test_rounded_activations() -> None:
    arguments = ["--weights", "int8", "--activations", "16", "int8"]
    few = {spec.name: spec for spec in parse(arguments, None).chosen if spec.weights == "int8"}
    assert len(few) == 2 + 2 * 4
    assert few[f"{NATIVE} int8"].activations == "16"
    assert few[f"{NATIVE} int8 a8"].activations == "int8"


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_gguf(tmp_path / "model.gguf", model_of())
    return str(tmp_path / "model.gguf")


def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    write_gguf(tmp_path / "model.gguf", model_of(), parts=3)
    part = min(tmp_path.glob("model-*.gguf"))
    for path, says in ((damaged, "A GGUF file is not valid"), (part, "must hold the whole model")):
        with pytest.raises(SystemExit):
            parse([str(path)], None)
        assert says in capsys.readouterr().err


def test_sides_of_directories(file: str, tmp_path: Path) -> None:
    AutoConfig.for_model(**preset("tiny-qwen3")).save_pretrained(tmp_path / "checkpoint")
    options = parse([file, str(tmp_path / "checkpoint")], None)
    assert options.reference == NATIVE and [s.name for s in options.chosen] == [NATIVE]


def test_sides_of_files(file: str) -> None:
    options = parse([file, "--activations", "16", "int8"], None)
    assert options.files == [Path(file)] and options.reference == LLAMA
    assert [s.name for s in options.chosen] == [LLAMA, OPENVINO, NATIVE, f"{NATIVE} a8"]
    assert [s.activations for s in options.chosen] == ["16", "16", "16", "int8"]
    assert [s.name for s in parse([file, "--sides", "native"], None).chosen] == [NATIVE]


@pytest.mark.parametrize(
    "more", [["--weights", "int8"], ["--dtypes", "fp32"], ["--model", "m"], ["--directory", "d"]]
)
def test_options_of_checkpoints_do_not_apply_to_files(
    file: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([file, *more], None)
    assert f"{more[0]} applies to presets, not to files and directories" in capsys.readouterr().err


def test_peers_run_under_their_own_interpreters(tmp_path: Path) -> None:
    pythons = {name: tmp_path / name for name in PEER_KINDS}
    for path in pythons.values():
        path.symlink_to(sys.executable)
    options = [word for name in pythons for word in ("--peer-python", f"{name}={pythons[name]}")]
    chosen = {spec.name: spec for spec in parse(options, None).chosen}
    assert len(chosen) == 9
    assert chosen[LLAMA].python == str(pythons["llama.cpp"]) and not chosen[LLAMA].export_python
    assert chosen[OPENVINO].python == str(pythons["openvino"])
    assert chosen[OPENVINO].export_python == str(pythons["openvino-export"])
    assert chosen[EAGER].python == sys.executable
