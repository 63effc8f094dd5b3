"""Hugging Face eager and the compiled model side by side: a prompt, and tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tpcompile.compare.agreement import WatchedRanks
from tpcompile.compare.choices import Choices, Place, compare_choices
from tpcompile.compare.rounded_cache import empty_cache
from tpcompile.compare.routing import Experts, choices_in, routed, routers_in
from tpcompile.compare.rows import Row, row_of, token_margin
from tpcompile.compare.source import Source, eager_model
from tpcompile.ir.info import info_of
from tpcompile.ir.ops import TOP_EXPERTS
from tpcompile.ir.ops.experts import Routed
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.model import CompiledModel

_DECODE_STEPS = 4


@dataclass(frozen=True)
class Run:
    """The logits of both models for the same tokens, and of eager in fp32 if needed."""

    name: str
    source: str
    eager: torch.Tensor
    compiled: torch.Tensor
    tolerance: float | None
    exact: torch.Tensor | None = None
    choices: tuple[Choices, ...] = ()
    """The choices of all routers in the run."""

    def rows(self) -> Iterator[Row]:
        """Yield the worst result of the choices, if there are any, and that of the logits."""
        rows = []
        for choices in self.choices:
            row = choices.row(f"{self.name}, experts", "chosen in all layers")
            problem = row.problem or choices.score_problem
            rows.append(replace(row, problem=problem, ok=not problem))
        if rows:
            yield max(rows, key=lambda row: (not row.ok, row.severity))
        yield row_of(
            self.name, self.source, self.compiled, self.eager, self.tolerance, exact=self.exact
        )


class Eager:
    """A Hugging Face model that processes sequences piece by piece."""

    def __init__(self, source: Source, cached: bool) -> None:
        self._model, self._cached = eager_model(source), cached
        self._routers = routers_in(source.captured.graph.graph)
        rounds = source.kv is not None
        self._past: Any = empty_cache(self._model.config, source.kv) if rounds else None
        self.routed: dict[int, Routed] = {}
        """The choices of the routers in the last call by layer, also for padding."""

    def caches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and the values of each layer's cache."""
        for layer in self._past.layers:
            yield layer.keys, layer.values

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, experts: Experts | None = None
    ) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode(), routed(self._model, self._routers, experts) as self.routed:
            out = self._model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=self._cached,
                **{CACHE: self._past},
            )
        self._past = out.get(CACHE)
        logits: torch.Tensor = out.logits
        return logits


@dataclass
class Answers:
    """Eager's answers to some tokens, and those of eager in fp32 with eager's choices if needed."""

    models: Sequence[Eager]
    """Eager, and eager in fp32 if needed."""
    tolerance: float | None
    logits: list[torch.Tensor] = field(default_factory=list)
    """The logits of each model, `[batch, columns, vocabulary]`."""
    step: int = -1
    """The number of the decode step, 0 for the prompt."""
    _routed: list[dict[int, Routed]] = field(default_factory=list)
    _tokens: list[tuple[int, int]] = field(default_factory=list)

    def ask(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Run tokens on all models. `mask` also covers the tokens before them."""
        eager, *references = self.models
        self.logits = [eager(ids, mask)]
        experts = {layer: choice.ids for layer, choice in eager.routed.items()}
        self.logits += [reference(ids, mask, experts) for reference in references]
        real = mask[:, -ids.shape[1] :].bool()
        self._routed = [
            {
                layer: Routed(*(side[real.flatten()] for side in choice))
                for layer, choice in model.routed.items()
            }
            for model in self.models
        ]
        places = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
        self._tokens = list(zip(real.nonzero()[:, 0].tolist(), places[real].tolist(), strict=True))
        self.step += 1

    @property
    def experts(self) -> dict[int, torch.Tensor]:
        """The experts that eager has chosen for each token without padding, by layer."""
        return {layer: choice.ids for layer, choice in self._routed[0].items()}

    def judge(
        self, side: str, choices: Mapping[int, Sequence[Routed]], graph: fx.Graph
    ) -> dict[int, Choices]:
        """Compare the choices of another side, which runs this graph, by layer and rank."""
        eager, *exact = self._routed
        calls = choices_in(graph)
        return {
            layer: compare_choices(
                Place(side, layer, self._tokens, self.step),
                eager[layer],
                ranks,
                exact[0][layer].logits if exact else None,
                self.tolerance,
                by_topk=calls[layer].target is not TOP_EXPERTS,
            )
            for layer, ranks in choices.items()
        }


def side_by_side(
    eager: Answers, compiled: CompiledModel, ranks: WatchedRanks, ids: torch.Tensor, mask: Any
) -> Iterator[Run]:
    """Run the prompts, then decode the tokens that eager chooses, through all KV caches.

    Eager has already answered the prompts. `ranks` are those of the compiled model.
    """
    cached = compiled.can_generate()
    with torch.inference_mode():
        ranks.experts = tuple(eager.experts.values())
        outputs = compiled(ids, attention_mask=mask, use_cache=cached)
        expected, *exact = [logits[mask.bool()] for logits in eager.logits]
        choices = _judged(eager, compiled, ranks)
        actual = outputs.logits[mask.bool()]
        yield Run("prompt", "", expected, actual, eager.tolerance, *_exact(exact), choices)
        if len(info_of(compiled.graph).outputs) > 1:
            answer = compiled(ids, attention_mask=mask, greedy=True)
            yield _best([logits[:, -1] for logits in eager.logits], answer.tokens, eager.tolerance)
        for step in range(_room(compiled, ids) if cached else 0):
            token = eager.logits[0][:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            eager.ask(token, mask)
            ranks.experts = tuple(eager.experts.values())
            past = {CACHE: outputs[CACHE]}
            outputs = compiled(token, attention_mask=mask, use_cache=True, **past)
            expected, *exact = [logits[:, -1] for logits in eager.logits]
            choices = _judged(eager, compiled, ranks)
            yield Run(
                f"decode step {step + 1}",
                "one by one through the KV cache",
                expected,
                outputs.logits[:, -1],
                eager.tolerance,
                *_exact(exact),
                choices,
            )


def _exact(exact: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None]:
    return (exact[0] if exact else None,)


def _judged(eager: Answers, compiled: CompiledModel, ranks: WatchedRanks) -> tuple[Choices, ...]:
    choices = {layer: [choice] for layer, choice in zip(eager.experts, ranks.choices, strict=True)}
    return tuple(eager.judge("emitted", choices, compiled.graph.graph).values())


def ends(
    runs: Sequence[Run],
    captured: torch.Tensor,
    choices: tuple[Choices, ...],
    sharded: torch.Tensor,
    where: str,
) -> Iterator[Run]:
    """Yield the captured graph and the emitted modules on the prompt, then the other runs.

    `choices` are those of the captured graph.
    """
    prompt, *further = runs
    source = "Hugging Face eager"
    yield replace(prompt, name="captured", source=source, compiled=captured, choices=choices)
    yield replace(prompt, name="emitted", source=f"modules of the ranks, {where}", eager=sharded)
    yield from further


def _best(
    eager_logits: Sequence[torch.Tensor], tokens: torch.Tensor, tolerance: float | None
) -> Run:
    """Compare the logits of the tokens that the ranks chose with the highest logits."""
    logits, *exact = eager_logits
    chosen = logits.gather(-1, tokens[:, None])
    source = "chosen without gathering logits"
    margin = token_margin(logits, exact[0] if exact else None, tolerance)
    return Run("best tokens", source, logits.amax(-1, keepdim=True), chosen, margin)


def _room(compiled: CompiledModel, ids: torch.Tensor) -> int:
    return max(0, min(_DECODE_STEPS, compiled.max_seq_len - ids.shape[1]))
