"""The options of a request: lengths, sampling and stop conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tpcompile.errors import UsageError
from tpcompile.serving.structure import Structure
from tpcompile.serving.thinking import ThinkingRules

_MOST_SEED = 2**63 - 1
_MOST_BIAS = 100
_COLDEST = 1e-5
"""The least temperature that is not greedy. fp32 logits divided by it are finite."""


@dataclass(frozen=True)
class SamplingParams:
    """The options of a request. The defaults continue greedily, as Hugging Face's do."""

    max_tokens: int | None = None
    """The maximum number of new tokens; None for as many as fit."""
    min_tokens: int = 0
    """The minimum number of new tokens: no earlier token ends the sequence."""
    n: int = 1
    """The number of continuations."""
    temperature: float = 0.0
    """0 is greedy: the best token, the first one if several are equal. Else at least 1e-5."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """As Hugging Face's: over the prompt and all new tokens."""
    presence_penalty: float = 0.0
    """As OpenAI's: subtracted from the logits of each new token that has occurred."""
    frequency_penalty: float = 0.0
    """As OpenAI's: the same, times its occurrences."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """As OpenAI's: numbers from -100 to 100 by token, added to the logits before all else. The
    log-probabilities are those without them. They are stored as pairs, by token."""
    seed: int | None = None
    """With a seed, the continuation is always the same; else each request has its own."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation, and are not part of it. They need a tokenizer."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the continuation, besides those of the model."""
    ignore_eos: bool = False
    """Whether the model's own tokens do not end it."""
    logprobs: int | None = None
    """The number of best tokens whose log-probabilities are returned, besides the chosen one's."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, all of which are computed, even if they are cached."""
    structure: Structure | None = None
    """The form that the text must have. It needs a tokenizer."""

    thinking: ThinkingRules | None = None
    """The tokens of thinking, if its length is limited or it must come first."""
    shown_tokens: tuple[int, ...] = ()
    """Special tokens that are part of the text. Others are not."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_ranges()
        if 0 < self.temperature < _COLDEST:
            raise UsageError(
                f"temperature must be 0 (greedy), or a number from {_COLDEST:g} to 100, "
                f"got {self.temperature!r}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                "min_tokens must be at most max_tokens",
                got=f"{self.min_tokens} and {self.max_tokens}",
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise UsageError(f"stop must consist of texts that are not empty, got {self.stop!r}")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise UsageError(f"structure must be a Structure or None, got {self.structure!r}")
        if self.thinking is not None and not isinstance(self.thinking, ThinkingRules):
            raise UsageError(f"thinking must be ThinkingRules or None, got {self.thinking!r}")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("stop_tokens", "shown_tokens"):
            tokens = tuple(getattr(self, name))
            object.__setattr__(self, name, tokens)
            if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
                raise UsageError(f"{name} must be token ids, got {tokens!r}")

    def unknown_token(self, size: int) -> tuple[str, int] | None:
        """Return the first option with a token outside a vocabulary of `size`, and that token."""
        thinking = () if self.thinking is None else self.thinking.tokens
        tokens: dict[str, Iterable[int]] = {
            "stop_tokens": self.stop_tokens,
            "thinking": thinking,
            "logit_bias": dict(self.biases),
        }
        unknown = ((name, token) for name in tokens for token in tokens[name])
        return next(((name, token) for name, token in unknown if not 0 <= token < size), None)

    def _check_ranges(self) -> None:
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kinds = int if whole else (int, float)
            number = isinstance(value, kinds) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise UsageError(f"{name} must be {_range_text(low, high, whole)}, got {value!r}")
            if not whole:
                object.__setattr__(self, name, float(value))

    def check_vocabulary(self, size: int) -> None:
        """Raise if a token of the options is not one of `size` tokens."""
        if (unknown := self.unknown_token(size)) is not None:
            name, token = unknown
            raise UsageError(f"Tokens of {name} must be from 0 to {size - 1}, got {token}")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The tokens of `logit_bias`, with their biases."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def plain(self) -> bool:
        """Whether the best token is always chosen, and only the token is requested."""
        changed = self.min_tokens or self.logprobs is not None or self.repetition_penalty != 1
        changed = changed or self.structure is not None or bool(self.logit_bias)
        return not (changed or self.temperature or self.presence_penalty or self.frequency_penalty)


_OPTIONAL = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_RANGES: dict[str, tuple[float, float, bool]] = {
    "max_tokens": (1, math.inf, True),
    "min_tokens": (0, math.inf, True),
    "n": (1, 128, True),
    "temperature": (0.0, 100.0, False),
    "top_k": (1, math.inf, True),
    "top_p": (1e-9, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1e-9, 100.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "seed": (0, _MOST_SEED, True),
    "logprobs": (0, 20, True),
    "prompt_logprobs": (0, 20, True),
}
"""The minimum and the maximum, and whether the value must be whole."""


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of tokens and biases, by token; raise for others."""
    try:
        pairs = dict(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"logit_bias must be a mapping of tokens to numbers, got {value!r}"
        ) from error
    for token, bias in pairs.items():
        if not isinstance(token, int) or isinstance(token, bool):
            raise UsageError(f"Tokens of logit_bias must be token ids, got {token!r}")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -_MOST_BIAS <= bias <= _MOST_BIAS:
            limits = _range_text(-_MOST_BIAS, _MOST_BIAS, False)
            raise UsageError(f"logit_bias must be {limits}, got {bias!r} for token {token}")
    return tuple((token, float(bias)) for token, bias in sorted(pairs.items()))


def _range_text(low: Any, high: Any, whole: bool) -> str:
    kind = "an integer" if whole else "a number"
    if high == math.inf:
        return f"{kind} of at least {low:g}"
    return f"{kind} from {low:g} to {high:g}"
