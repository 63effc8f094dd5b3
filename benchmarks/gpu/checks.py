"""Checks of numbers, which come before any timing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch

import tpcompile
from benchmarks.gpu.kernels import Megakernel, Shape
from tpcompile.backends.measuring import RandomMemory, place_full
from tpcompile.runtime.cache_name import CACHE
from tpcompile.vm.program import Role
from tpcompile.vm.schedule.policies import POLICIES

_PROMPTS, _PROMPT, _STEPS = 4, 24, 16


@dataclass(frozen=True)
class Check:
    """A property that must hold, and what was found."""

    name: str
    ok: bool
    found: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_error(name: str, eager: Any) -> Check:
    """Compare the errors against fp32 of our decode steps and of Hugging Face's.

    All get the same tokens: those that the fp32 model finds best after random prompts. The error of
    one prompt may be larger by chance.
    """
    exact = copy.deepcopy(eager).float()
    runs = []
    for seed in range(_PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, eager.config.vocab_size, (1, _PROMPT), generator=generator)
        tokens = [ids.to(eager.device)]
        wanted = list(_steps(exact, tokens))
        runs.append((tokens, wanted))
    del exact
    theirs = _error(eager, runs)
    longest = _PROMPT + _STEPS
    with tpcompile.compile(
        eager, backend="triton", device=eager.device, max_seq_len=longest
    ) as model:
        ours = _error(model, runs)
        assert model.steps.program == _PROMPTS * _STEPS, "modules must run prompts only"
    errors = f"{ours:.2e}, Hugging Face {theirs:.2e}"
    says = f"{name}: error of bf16 against fp32 is not above Hugging Face's"
    return Check(says, ours <= theirs, errors)


def _error(model: Any, runs: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> float:
    """Return the mean relative error of logits, given the tokens of runs and the exact logits."""
    errors = [
        float((logits - wanted).norm() / wanted.norm())
        for tokens, exact in runs
        for logits, wanted in zip(_steps(model, list(tokens)), exact, strict=True)
    ]
    return mean(errors)


def _steps(model: Any, tokens: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the logits of decode steps. The first model adds the tokens, which the others take."""
    grows, cache = len(tokens) == 1, None
    with torch.inference_mode():
        for step in range(_STEPS + 1):
            output = model(
                input_ids=tokens[step], use_cache=True, logits_to_keep=1, **{CACHE: cache}
            )
            cache = output[CACHE]
            if step:
                yield output.logits[0, -1].float()
            if grows:
                tokens.append(output.logits[:, -1].argmax(-1, keepdim=True))


def check_bits(shape: Shape, random: RandomMemory, repeats: int) -> Iterator[Check]:
    """Check that the bits of logits depend neither on the run nor on the schedule or the batch."""
    program = shape.program(random.device)
    first = Megakernel(shape, program, random)
    (first_cache,) = first.executor.memory.values(Role.CACHE)
    wanted = _logits(first, shape)
    equal = sum(torch.equal(_logits(first, shape), wanted) for _ in range(repeats))
    yield Check(
        f"{shape.model}: the same bits in every run", equal == repeats, f"{equal}/{repeats}"
    )
    workers = len(program.queues)
    shapes = [replace(shape, policy=policy) for policy in POLICIES]
    shapes += [replace(shape, workers=count) for count in {1, workers // 2, workers - 1} if count]
    shapes += [replace(shape, batch=batch) for batch in (2, 4)]
    for other in shapes:
        changed = [
            f"{name} {value}"
            for name, value in asdict(other).items()
            if value != getattr(shape, name)
        ]
        side = Megakernel(other, other.program(random.device), random)
        (cache,) = side.executor.memory.values(Role.CACHE)
        cache[:, :, : first_cache.shape[2]] = first_cache  # the first sequence has the first blocks
        ok = torch.equal(_logits(side, other)[:1], wanted)
        side.close()
        changes = ", ".join(changed) or "the default policy"
        yield Check(
            f"{shape.model}: the same bits with {changes}", ok, "same" if ok else "different"
        )


def _logits(side: Megakernel, shape: Shape) -> torch.Tensor:
    place_full(side.executor, shape.context)
    side.executor.run(1)
    return side.executor.logits.clone()
