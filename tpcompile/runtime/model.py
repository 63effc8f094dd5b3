"""The compiled model as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tpcompile.backends.torch_tp import SimulatedGroup, emit_source, load_rank, run_simulated
from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.frontend import Captured
from tpcompile.inspect.plan import PlanReport, plan_report
from tpcompile.ir.meta import info_of, parameter_of, parameters
from tpcompile.ir.pieces import Read, unshard
from tpcompile.ir.recipe import tensors_of
from tpcompile.ir.simulate import materialise
from tpcompile.passes import Stage
from tpcompile.runtime.packing import pack


class CompiledModel(nn.Module):
    """A causal LM over simulated ranks: threads of this process, one module each."""

    def __init__(
        self, captured: Captured, graph: fx.GraphModule, stages: Sequence[Stage], read: Read
    ) -> None:
        super().__init__()
        self.config = captured.config
        self.stages = list(stages)
        self._graph = (graph,)  # in a tuple it is no submodule: its parameters hold no numbers
        self.tp = info_of(graph).tp
        self._aliases = captured.aliases
        self._group = SimulatedGroup(self.tp)
        self._sources = [emit_source(graph, rank) for rank in range(self.tp)]
        weights = materialise(graph, read)
        self.ranks = nn.ModuleList(
            load_rank(
                source,
                rank,
                {name: parts[rank] for name, parts in weights.items()},
                captured.rotary.fresh(),
                self._group.rank(rank),
            )
            for rank, source in enumerate(self._sources)
        )
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return info_of(self.graph).outputs[0].dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def graph(self) -> fx.GraphModule:
        """The graph after the last pass."""
        return self._graph[0]

    @property
    def plan(self) -> PlanReport:
        """Who holds what, and what crosses between ranks."""
        return plan_report(self.graph)

    def source(self, rank: int = 0) -> str:
        """The generated module of a rank, as Python."""
        if not isinstance(rank, int) or not 0 <= rank < self.tp:
            raise UsageError(f"There is no rank {rank!r}", expected=f"0 to {self.tp - 1}")
        return self._sources[rank]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor]:
        """Logits, as Hugging Face's causal LMs give them; there is no cache yet."""
        self._check_open()
        if past_key_values is not None or use_cache:
            raise UnsupportedError(
                "Simulated ranks keep no KV cache",
                hint="Give the whole sequence, without past_key_values and use_cache",
            )
        _check_ids(input_ids, self.config.vocab_size)
        packed = pack(input_ids, attention_mask, position_ids, logits_to_keep)
        inputs = tuple(packed.inputs().values())
        logits = run_simulated(list(self.ranks), self._group, inputs)[0]
        unpacked = packed.unpack(logits)
        if return_dict is False:
            return (unpacked,)
        return CausalLMOutputWithPast(logits=unpacked)

    def gather_weight(self, name: str) -> torch.Tensor:
        """A checkpoint tensor put together again from the ranks' shards."""
        self._check_open()
        known = self._aliases.get(str(name), str(name))
        shapes = {
            tensor.name: tensor.shape
            for node in parameters(self.graph.graph)
            for tensor in tensors_of(parameter_of(node).whole)
        }
        if known not in shapes:
            raise UsageError(
                f"The model has no tensor {name!r}", hint=did_you_mean(str(name), shapes)
            )
        shards = [
            (recipe, module.get_parameter(str(node.target)))
            for node in parameters(self.graph.graph)
            for recipe, module in zip(parameter_of(node).shards, self.ranks, strict=True)
        ]
        return unshard(known, shapes[known], shards)

    def close(self) -> None:
        """Give the ranks' memory back; plan, stages and sources stay."""
        self.ranks = nn.ModuleList()
        self._group = SimulatedGroup(self.tp)

    def _check_open(self) -> None:
        if not len(self.ranks):
            raise UsageError("The model is closed", hint="Compile it again")

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_ids(input_ids: torch.Tensor, vocabulary: int) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise UsageError("input_ids must be a tensor", got=type(input_ids).__name__)
    if not input_ids.numel():
        raise UsageError("input_ids holds no tokens", got=f"shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise UsageError("input_ids must be whole numbers", got=str(input_ids.dtype))
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(
            "input_ids holds a token that is not in the vocabulary",
            got=str(low if low < 0 else high),
            expected=f"0 to {vocabulary - 1}",
        )
