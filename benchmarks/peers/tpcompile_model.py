"""Models that tpcompile compiled. The ranks are worker processes or, with tp=1, this process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import tpcompile
from benchmarks.peers.kinds import Continued, Loaded, Settings, Sizes, Written
from benchmarks.peers.torch_decoder import TorchDecoder
from tpcompile.ir.meta import parameters, value_type
from tpcompile.ir.ops import EMBEDDING, VOCAB_EMBEDDING
from tpcompile.ir.ops.spec import local_bytes

_EMBEDDINGS = (EMBEDDING, VOCAB_EMBEDDING)


def modules(settings: Settings) -> Loaded:
    """Load with torch modules."""
    return _load(settings, "torch")


def native(settings: Settings) -> Loaded:
    """Load with the native executor."""
    return _load(settings, "native")


def launches(settings: Settings) -> Loaded:
    """Load with the native executor, whose launches may run many tokens; threads by default."""
    return _generating(settings, StoppingCriteriaList())


def tokens(settings: Settings) -> Loaded:
    """Load as `launches` does, with Python code after each token, so a launch runs one token."""
    return _generating(settings, StoppingCriteriaList([_Never()]))


def engine(settings: Settings) -> Loaded:
    """Load with the default backend, and an engine in this process."""
    torch.set_num_threads(settings.threads)
    model = tpcompile.compile(
        settings.directory,
        tp=settings.tp,
        max_batch=settings.largest_batch,
        max_seq_len=settings.longest,
    )
    running = tpcompile.Engine(model).start()
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]

    def close() -> None:
        running.close()
        model.close()

    return Loaded(EngineService(running), processes, close=close)


class EngineService:
    """An engine that runs in a thread. Each request has another one, as in a server."""

    def __init__(self, engine: tpcompile.Engine) -> None:
        self._engine = engine

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Add all requests, and take their tokens as they come."""
        params = tpcompile.SamplingParams(max_tokens=new, ignore_eos=True)
        begun = time.perf_counter()
        handles = [self._engine.add(list(prompt), params) for prompt in prompts]
        with ThreadPoolExecutor(len(handles)) as pool:
            return list(pool.map(lambda handle: self._follow(handle, begun), handles))

    def _follow(self, handle: Any, begun: float) -> Continued:
        tokens, times = [], []
        for event in handle:
            if event.chosen is not None:
                tokens.append(event.chosen.token)
                times.append(time.perf_counter() - begun)
        return tokens, times


class _Never(StoppingCriteria):
    """Stopping criteria that are asked after each token and never stop."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Clock(BaseStreamer):
    """A streamer that records when each token comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.monotonic())
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Do nothing: all tokens have come."""


class GreedyWriter:
    """`generate` with a streamer."""

    def __init__(self, model: Any, criteria: StoppingCriteriaList) -> None:
        self._model, self._criteria = model, criteria

    def write(self, prompt: Sequence[int], new: int) -> Written:
        """Continue a prompt greedily by `new` tokens."""
        clock = _Clock()
        self._model.generate(
            torch.tensor([list(prompt)]),
            do_sample=False,
            max_new_tokens=new,
            stopping_criteria=self._criteria,
            streamer=clock,
        )
        return clock.tokens[len(prompt) :], clock.times[1:]  # the prompt came first


def _generating(settings: Settings, criteria: StoppingCriteriaList) -> Loaded:
    """Load as a user does: the number of threads is chosen for the cores of this process."""
    model = tpcompile.compile(settings.directory, tp=settings.tp, backend="native")
    model.generation_config.eos_token_id = None
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]
    return Loaded(GreedyWriter(model, criteria), processes, close=model.close)


def _load(settings: Settings, backend: str) -> Loaded:
    torch.set_num_threads(settings.threads)
    begun = time.perf_counter()
    model = tpcompile.compile(
        settings.directory,
        tp=settings.tp,
        backend=backend,
        max_batch=settings.largest_batch,
        weights=settings.weights or None,
        head=settings.head,
        activations=settings.activations,
    )
    seconds = time.perf_counter() - begun
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]
    decoder = TorchDecoder(model, lambda: None)
    return Loaded(decoder, processes, close=model.close, sizes=sizes_of(model), seconds=seconds)


def sizes_of(model: Any) -> Sizes:
    """Return the bytes of the weights of all ranks, of the cache and of states."""
    shares = model.plan.ranks
    held = sum(share.weight_bytes for share in shares)
    tables = [node for node in parameters(model.graph.graph) if {*_targets(node)} <= {*_EMBEDDINGS}]
    rows = sum(local_bytes(value_type(n), share.rank) for n in tables for share in shares)
    return Sizes(
        held,
        held - rows,
        sum(share.kv_bytes_per_token for share in shares),
        sum(share.state_bytes_per_sequence for share in shares),
    )


def _targets(node: fx.Node) -> Iterator[Any]:
    return (user.target for user in node.users)
