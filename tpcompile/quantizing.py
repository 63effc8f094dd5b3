"""`quantize`: write a checkpoint of compressed-tensors with weights in few bits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from tpcompile.errors import UsageError
from tpcompile.frontend import Captured, capture
from tpcompile.inspect.tables import table_text
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import parameter_of, parameters, value_type
from tpcompile.ir.pieces import Read, evaluate
from tpcompile.ir.recipe import Recipe, Tensor
from tpcompile.ir.simulate import run_streamed
from tpcompile.libraries import library_errors
from tpcompile.options import dtype_of, rounds_inputs, scheme_of
from tpcompile.runtime.generation import generation_config_of
from tpcompile.runtime.kv.packing import pack
from tpcompile.runtime.new_directory import new_directory
from tpcompile.runtime.quantizing import Quantizing
from tpcompile.runtime.saving import begin_files, split, write_settings
from tpcompile.runtime.weights import directory_of, opened, weights_of
from tpcompile.runtime.whole_weights import WholeWeights

_Say = Callable[[str], None]
_BLOCK = 1 << 22
"""The elements of a weight that are compared at a time."""
_COPIED = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""The files of a tokenizer."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that was written, and its error."""

    name: str
    format: str
    bytes: int
    rel_error: float
    """The root mean square of the differences, over that of the values."""


@dataclass(frozen=True)
class LogitsError:
    """The difference of the logits of the tokens of a text, both computed in fp32."""

    tokens: int
    kl: float
    """The mean of the Kullback-Leibler divergence from the original model, in nats."""
    top1: float
    """The share of tokens after which both models choose the same one."""
    max_abs: float
    mean_abs: float


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The result of `quantize`."""

    directory: str
    layers: tuple[QuantizedWeight, ...]
    bytes_before: int
    """The bytes of all tensors in the dtype of the model."""
    bytes_after: int
    logits: LogitsError | None

    def to_json(self) -> dict[str, Any]:
        """Return the data of the report."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}

    def table(self) -> str:
        """Format the errors of the weights, and those of the logits."""
        from rich.table import Table

        table = Table(title=f"weights in {self.directory}", title_justify="left")
        table.add_column("weight", overflow="fold")
        for column in ("format", "bytes", "relative error"):
            table.add_column(column, justify="right")
        for layer in self.layers:
            table.add_row(layer.name, layer.format, f"{layer.bytes:,}", f"{layer.rel_error:.2%}")
        before, after = (f"{size / 1e6:,.1f} MB" for size in (self.bytes_before, self.bytes_after))
        text = table_text(table) + f"all tensors: {before} before, {after} after\n"
        if self.logits is None:
            return text
        logits = self.logits
        return text + (
            f"logits of {logits.tokens} tokens: KL {logits.kl:.2g} nats, the same choice after "
            f"{logits.top1:.1%},\ndifferences of {logits.mean_abs:.2g} on average and "
            f"{logits.max_abs:.2g} at most\n"
        )


@library_errors()
def quantize(
    model: Any,
    weights: str,
    directory: str | Path,
    *,
    head: str | None = None,
    activations: str = "16",
    dtype: torch.dtype | str | None = None,
    tokens: Sequence[int] | None = None,
    max_shard_size: int | str = "5GB",
    say: _Say = lambda text: None,
) -> QuantizedCheckpoint:
    """Write the checkpoint that `compile(model, weights=weights, head=head)` has in memory.

    `directory` must be new or empty. One weight is held at a time. transformers loads the result
    with compressed-tensors. Then each weight is read back and compared. With the ids of `tokens`,
    so are the logits of both models, computed weight by weight in fp32. `activations` is as for
    `compile`; the checkpoint does not depend on it.
    """
    scheme, rounds = scheme_of(weights, head), rounds_inputs(activations)
    with new_directory(directory) as output:
        say(f"capturing {model if isinstance(model, str) else type(model).__name__}")
        captured = capture(model, dtype=dtype_of(dtype), scheme=scheme)
        source = weights_of(captured, model, None)
        with opened(source) as read:
            assert isinstance(read, Quantizing)
            kind = value_type(next(iter(parameters(captured.graph.graph)))).dtype
            settings = generation_config_of(captured, source)
            name = info_of(captured.graph).model
            write_settings(output, captured.config, kind, name, settings)
            if isinstance(model, str | Path):
                _copy_tokenizer(directory_of(model, _COPIED), output)
            after = _write(captured, read, output, max_shard_size, say)
            written = capture(output, dtype=kind)
            with opened(weights_of(written, output, None)) as back:
                layers = tuple(_errors(captured, read, back, say))
            logits = None
            if tokens is not None:
                config = model.config if isinstance(model, nn.Module) else model
                logits = _logits_error(config, kind, read, output, tokens, rounds, say)
    before = _bytes_before(captured, kind)
    return QuantizedCheckpoint(str(directory), layers, before, after, logits)


class _Streamed:
    """The parameters of a graph of one rank, evaluated on access."""

    def __init__(self, graph: fx.Graph, read: Read) -> None:
        self._read = read
        self._recipes: Mapping[str, tuple[Recipe, torch.dtype]] = {
            f"{node.target}{part.suffix}": (recipe, part.dtype.torch)
            for node in parameters(graph)
            for part, recipe in parameter_of(node).components(0)
        }

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        recipe, dtype = self._recipes[name]
        return evaluate(recipe, self._read).to(dtype)


def _write(
    captured: Captured, read: Quantizing, output: Path, max_shard_size: int | str, say: _Say
) -> int:
    """Write the tensors one at a time; return their bytes."""
    whole = WholeWeights(captured.graph, captured.tensors, captured.aliases, captured.encodings)
    metas = whole.metas()
    count = sum(math.prod(tensor.shape) for tensor in captured.tensors.values())
    writer = begin_files(output, split(metas, max_shard_size), metas, count)
    streamed = _Streamed(captured.graph.graph, read)
    for number, (name, tensor) in enumerate(whole.gather_all(metas, streamed)):
        say(f"writing tensor {number + 1} of {len(metas)}: {name}")
        writer.write(name, tensor.cpu())
    return sum(tensor.nbytes for tensor in metas.values())


def _copy_tokenizer(source: Path, output: Path) -> None:
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, output / file.name)


def _errors(
    captured: Captured, read: Quantizing, back: Read, say: _Say
) -> Iterator[QuantizedWeight]:
    """Compare each weight that was written with its values in the source."""
    for number, (name, source) in enumerate(captured.quantized.items()):
        say(f"comparing weight {number + 1} of {len(captured.quantized)}: {name}")
        tensor = captured.tensors[name]
        assert tensor.format is not None
        *extents, columns = tensor.shape
        error, size = 0.0, 0.0
        for box in _boxes(extents, max(1, _BLOCK // columns)):
            wanted = read.original(source, (*box, slice(0, columns))).float().cpu()
            decoded = _decoded(tensor, box, back)
            error += float((decoded - wanted).square().sum(dtype=torch.float64))
            size += float(wanted.square().sum(dtype=torch.float64))
        held = math.prod(extents) * tensor.format.row_bytes(0, columns)
        yield QuantizedWeight(name, str(tensor.format), held, math.sqrt(error / (size or 1.0)))


def _boxes(extents: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield parts of at most `limit` rows, each of one expert."""
    *stacks, rows = extents
    for place in product(*map(range, stacks)):
        for start in range(0, rows, limit):
            part = slice(start, min(start + limit, rows))
            yield (*(slice(index, index + 1) for index in place), part)


def _decoded(tensor: Tensor, rows: tuple[slice, ...], read: Read) -> torch.Tensor:
    assert tensor.format is not None
    columns = tensor.shape[-1]
    parts = {
        part.suffix: read(tensor.name + part.suffix, (*rows, slice(*part.span(0, columns))))
        for part in tensor.format.components
    }
    return tensor.format.decoded(parts, (0, columns), torch.float32)


def _bytes_before(captured: Captured, kind: torch.dtype) -> int:
    """Return the bytes of all tensors in the dtype of the model, tied ones once."""
    sizes = {
        captured.quantized.get(name, name): math.prod(tensor.shape)
        for name, tensor in captured.tensors.items()
    }
    return sum(sizes.values()) * kind.itemsize


def _logits_error(
    model: Any,
    kind: torch.dtype,
    read: Quantizing,
    output: Path,
    tokens: Sequence[int],
    rounds: bool,
    say: _Say,
) -> LogitsError:
    """Compare the logits of both models for the same tokens."""
    ids = torch.tensor([list(tokens)])

    def original(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return read.original(name, index).to("cpu", kind)

    say(f"computing the logits of {ids.numel()} tokens with the original weights")
    exact = _logits(capture(model, dtype=torch.float32), original, ids)
    say(f"computing the logits of {ids.numel()} tokens with the quantized weights")
    written = capture(output, dtype=torch.float32, rounds=rounds)
    with opened(weights_of(written, output, None)) as back:
        quantized = _logits(written, back, ids)
    kl = same = most = total = 0.0
    for exact_row, quantized_row in zip(exact, quantized, strict=True):
        before, after = exact_row.double(), quantized_row.double()
        logs = before.log_softmax(-1)
        kl += float((logs.exp() * (logs - after.log_softmax(-1))).sum())
        same += float(before.argmax() == after.argmax())
        differences = (after - before).abs()
        most, total = max(most, float(differences.max())), total + float(differences.mean())
    count = ids.numel()
    return LogitsError(count, kl / count, same / count, most, total / count)


def _logits(captured: Captured, read: Read, ids: torch.Tensor) -> torch.Tensor:
    length = captured.config.max_position_embeddings
    vocabulary = captured.config.vocab_size
    if not 0 < ids.numel() <= length or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise UsageError(
            "The text must have at least one token, and no more than the model has positions",
            got=f"{ids.numel():,} tokens",
            expected=f"1 to {length:,} ids below {vocabulary:,}",
        )
    packed = pack(ids, torch.ones_like(ids))
    with torch.inference_mode():
        return run_streamed(captured.graph, packed.inputs(), read, captured.rotary.fresh()).double()
