"""OpenVINO: a stateful model, with the cache in the dtype of the weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset8

from benchmarks.peers.kinds import Loaded, Settings, Sizes

ROOT = Path(__file__).parents[2]
MODEL = "openvino_model.xml"
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
PRECISION_BYTES = {"bf16": 2, "f32": 4}
SAME_VALUES = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "ShapeOf")
"""Types of the nodes that decode a weight, or ask for its shape."""


def load(settings: Settings) -> Loaded:
    """Compile a GGUF file, or a checkpoint; export the latter if no side has done so."""
    precision = precision_of(settings)
    with ExitStack() as stack:  # a converted file is deleted once it is compiled
        if settings.is_file:
            directory = stack.enter_context(converted(settings.path))
        else:
            directory = exported(settings)
        core = openvino.Core()
        model = core.read_model(directory / MODEL)
        keep_last_logits(model)
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": settings.threads,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
            },
        )
        sizes = sizes_of(model, PRECISION_BYTES[precision])
        return Loaded(OpenVinoDecoder(compiled), [os.getpid()], sizes=sizes)


def precision_of(settings: Settings) -> str:
    """Return OpenVINO's name of the dtype of the weights, or of fp32 on a CPU that lacks it.

    The products of GGUF files are those of models in bf16.
    """
    config = settings.path / "config.json"
    dtype = "bfloat16" if settings.is_file else json.loads(config.read_text())["dtype"]
    wanted = PRECISIONS[dtype]
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return wanted if wanted.upper() in capabilities else "f32"


@contextmanager
def converted(file: Path) -> Iterator[Path]:
    """Provide the directory of a GGUF file's model, which OpenVINO GenAI writes beside the file."""
    import openvino_genai

    with tempfile.TemporaryDirectory(prefix="tpcompile-openvino-") as directory:
        link = Path(directory) / file.name
        link.symlink_to(file)
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        yield link.parent


def exported(settings: Settings) -> Path:
    """Return the directory of the converted model; convert it if no side has done so."""
    out = settings.path / "-".join(["openvino", *_integers(settings)])
    if out.exists():
        return out
    unfinished = out.with_suffix(".part")
    python = settings.export_python or sys.executable
    command = [python, "-m", "benchmarks.peers.openvino_export", settings.directory]
    done = subprocess.run(
        [*command, str(unfinished), *_integers(settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for module, package in (("optimum", "optimum-intel"), ("nncf", "nncf")):
        if f"No module named '{module}" in done.stderr:
            raise ModuleNotFoundError(f"{python} has no {package}, which converts the checkpoint")
    if done.returncode:
        raise RuntimeError(f"the conversion failed:\n{done.stderr[-2000:]}")
    unfinished.rename(out)
    return out


def _integers(settings: Settings) -> list[str]:
    return [settings.integers] if settings.integers else []


def sizes_of(model: Any, cached: int) -> Sizes:
    """Return the bytes of the constants of a model, and of a cache with values of so many bytes.

    States of linear attention have all dimensions but the batch.
    """
    held = read = values = states = 0
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            held += node.get_byte_size()
            read += node.get_byte_size() * (_users(node) != {"Gather"})
        elif node.get_type_name() == "ReadValue":  # keys or values: batch, heads, tokens, width
            _, *shape = node.get_output_partial_shape(0)
            known = math.prod(dimension.get_length() for dimension in shape if dimension.is_static)
            if all(dimension.is_static for dimension in shape):
                states += known * node.get_output_element_type(0).size
            else:
                values += known
    return Sizes(held, read, values * cached, states)


def _users(node: Any) -> set[str]:
    """Return the types of the nodes that use a constant, after it has been decoded."""
    kinds = set()
    for place in (target.get_node() for target in node.output(0).get_target_inputs()):
        kind = place.get_type_name()
        kinds |= _users(place) if kind in SAME_VALUES else {kind}
    return kinds


def keep_last_logits(model: Any) -> None:
    """Slice the operand of the last matrix product, as OpenVINO GenAI does, and `logits_to_keep`.

    Otherwise a prompt would compute the logits of all its tokens.
    """
    node = model.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    sliced = opset8.slice(node.input_value(0), [-1], [np.iinfo(np.int64).max], [1], [1])
    node.input(0).replace_source_output(sliced.output(0))
    model.validate_nodes_and_infer_types()


class OpenVinoDecoder:
    """A compiled model, and the request that holds the state of its sequences."""

    def __init__(self, compiled: Any) -> None:
        self._request = compiled.create_infer_request()
        self._past = 0

    def begin(self, batch: int, length: int) -> None:
        """Reset the state, which grows with the sequences."""
        self._request.reset_state()
        self._past = 0

    def step(self, rows: Sequence[Sequence[int]]) -> Any:
        """Append tokens to each sequence."""
        ids = np.array([list(row) for row in rows], np.int64)
        batch, new_tokens = ids.shape
        end = self._past + new_tokens
        positions = np.tile(np.arange(self._past, end, dtype=np.int64), (batch, 1))
        self._request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones((batch, end), np.int64),
                "position_ids": positions,
                "beam_idx": np.arange(batch, dtype=np.int32),
            }
        )
        self._past = end
        return self._request.get_tensor("logits").data[:, -1]

    def numbers(self, logits: Any) -> Any:
        """Copy the logits, because the next step overwrites them."""
        return logits.astype(np.float32, copy=True)
