"""The time of a decode step's products on weights that stay in the caches of the cores.

With a large batch, a step may take longer to multiply than to read. Its limit is then the rate of
its own kernels on weights that need not be read from memory. The kernels are those of the
instructions of a program with one layer of each kind and a small head, whose other shapes are those
of the model. Each thread repeats an instruction whose weights fit into its second-level cache.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import torch

from tpcompile.backends.devices import machine_of
from tpcompile.backends.measuring import RandomMemory, place_full
from tpcompile.backends.native import Native
from tpcompile.backends.rotation import CPU
from tpcompile.closing import Closing
from tpcompile.frontend import config_of
from tpcompile.scheduling import schedule
from tpcompile.vm.program.instruction import WeightInstruction, unseen

_VOCABULARY = 2048
_CONTEXT = 64
_HEAD = -1
"""The layer of the instructions outside of layers."""
_REPEATS = 20
_SECOND_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
_DEFAULT = 1 << 19
"""The bytes of a second-level cache where the system does not tell them."""


class CachedProducts(Closing):
    """The instructions with products of a model's decode step, repeated on cached weights."""

    def __init__(
        self,
        model: str,
        dtype: torch.dtype,
        batch: int,
        threads: int,
        weights: str | None = None,
        head: str | None = None,
        activations: str = "16",
    ) -> None:
        config = copy.deepcopy(config_of(f"preset:{model}"))
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        counts = Counter(kinds)
        self._times: dict[int, float] = dict(enumerate(counts.values()))
        self._times[_HEAD] = config.vocab_size / _VOCABULARY
        config.num_hidden_layers, config.vocab_size = len(counts), _VOCABULARY
        if any(kinds):
            config.layer_types = list(counts)
        program = schedule(
            config,
            target=replace(machine_of(CPU), workers=threads),
            dtype=dtype,
            batch=batch,
            context=_CONTEXT,
            weights=weights,
            head=head,
            activations=activations,
        ).program
        self._products = {
            number: instruction
            for number, instruction in enumerate(program.instructions)
            if isinstance(instruction, WeightInstruction) and instruction.work
        }
        self._executor = Native(RandomMemory().memory(program))
        place_full(self._executor, _CONTEXT)
        self._executor.run(1)  # the instructions below get the values of a step
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self) -> float:
        """Return the time of the products of a step: those of the layers, and those of the head."""
        return sum(self._seconds(layer) * times for layer, times in self._times.items())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        self._executor.close()

    def _seconds(self, layer: int) -> float:
        """Return the time of the products of a layer or of the head, at their best rate."""
        chosen = {
            n: instruction
            for n, instruction in self._products.items()
            if max(instruction.layer, _HEAD) == layer
        }
        alike: dict[tuple[str, int, int], list[int]] = {}
        for number, instruction in chosen.items():
            alike.setdefault((instruction.name, instruction.traffic, instruction.work), []).append(
                number
            )
        most = _second_level() // 2
        smallest = min(traffic for _, traffic, _ in alike)
        rates = [
            self._rate(work, numbers)
            for (_, traffic, work), numbers in alike.items()
            if traffic <= max(most, smallest)
        ]
        return sum(instruction.work for instruction in chosen.values()) / max(rates)

    def _rate(self, work: int, numbers: list[int]) -> float:
        """Return the products per second of all threads, which repeat instructions of their own."""
        barrier = Barrier(self._threads)

        def repeat(thread: int) -> float:
            number = numbers[thread % len(numbers)]
            self._executor.execute(number, unseen)  # brings its weights into the caches
            barrier.wait()
            begun = time.perf_counter()
            for _ in range(_REPEATS):
                self._executor.execute(number, unseen)
            return _REPEATS * work / (time.perf_counter() - begun)

        return sum(self._pool.map(repeat, range(self._threads)))


def _second_level() -> int:
    """Return the bytes of the second-level cache of a core."""
    if not _SECOND_LEVEL.exists():
        return _DEFAULT
    return int(_SECOND_LEVEL.read_text().strip().removesuffix("K")) << 10
