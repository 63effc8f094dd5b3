"""The methods in addition to `forward` that Hugging Face's code calls on a causal LM."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from transformers import GenerationMixin

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.arguments import code_error, refuse_padded_ends
from tpcompile.runtime.cache_name import CACHE, renamed
from tpcompile.runtime.generation import decode_greedily
from tpcompile.runtime.kv.cache import PagedCache
from tpcompile.runtime.refusals import NO_GRADIENTS, Refusals, refusal

_NOT_FOR_FORWARD = ("tokenizer", "assistant_tokenizer")

_GenerationMixin: Any = GenerationMixin  # its methods type `self` as a Hugging Face model


class CausalLM(Refusals, _GenerationMixin):  # type: ignore[misc]
    """Methods for `generate`, pipelines and evaluation harnesses; users seldom call them."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    _is_stateful = False

    def _prepare_generation_config(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Merge the lengths of an assistant's call into a copy of its configuration.

        Hugging Face's assisted loop passes both, which is deprecated, and would be warned about.
        """
        if generation_config is not None and generation_config.is_assistant:
            generation_config = copy.deepcopy(generation_config)
            kwargs = generation_config.update(**kwargs)
        prepared: tuple[Any, dict[str, Any]] = super()._prepare_generation_config(
            generation_config, *args, **kwargs
        )
        return prepared

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        refuse_padded_ends(model_kwargs.get("attention_mask"))
        if generation_config.assistant_early_exit is not None:
            raise UnsupportedError(
                "A compiled model cannot draft with its own first layers: "
                f"assistant_early_exit={generation_config.assistant_early_exit!r} "
                "is not supported",
                hint="Pass a smaller model as assistant_model",
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise UnsupportedError(
                f"cache_implementation={implementation!r} is not supported: the KV cache of a "
                "compiled model is always stored in blocks on the ranks",
                expected="None or 'dynamic'",
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache:
            cache = self.new_cache()
            cache.temporary = not generation_config.return_dict_in_generate
            model_kwargs[CACHE] = cache

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        config = generation_config
        needs_logits = config.do_sample or config.return_dict_in_generate or config.is_assistant
        if needs_logits or logits_processor or not config.use_cache or not self.finds_tokens:
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        return decode_greedily(
            self, input_ids, stopping_criteria, generation_config, streamer, **model_kwargs
        )

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """Run Hugging Face's loop on guessed tokens; a program computes each as a row."""
        cache: PagedCache = kwargs[CACHE]
        cache.guesses = self.guesses if self.computes_rows else None
        try:
            return super()._assisted_decoding(*args, **kwargs)
        finally:
            cache.guesses = None

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare inputs as Hugging Face does, without the tokenizers that `generate` passes on."""
        inputs = {name: kwargs[name] for name in kwargs if name not in _NOT_FOR_FORWARD}
        return super().prepare_inputs_for_generation(*args, **renamed(inputs))

    def load_custom_generate(self, name: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: Hugging Face would run the code, older versions without trust_remote_code."""
        raise code_error(f"custom_generate={str(name)!r}")

    def can_generate(self) -> bool:
        """Return whether `generate` works; Hugging Face's pipelines call this."""
        return bool(self.keeps_cache)

    def tie_weights(self) -> None:
        """Do nothing: weights stay tied as captured. lm-evaluation-harness calls this."""

    @property
    def name_or_path(self) -> str:
        """The directory or hub id of the model; its tokenizer may be there too."""
        return str(self.config.name_or_path)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Self:
        """Raise if the device or dtype would change; `to`, `half` and `cuda` call this."""
        try:
            moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        except (AssertionError, RuntimeError) as error:  # torch raises these for a missing device
            raise UsageError(
                "A compiled model cannot be moved to another device",
                got="the error: " + str(error).split("\n")[0],
                expected=f"{self.dtype} on {self.device}",
                hint="Pass device and dtype to tpcompile.compile",
            ) from error
        if (moved.device, moved.dtype) != (self.device, self.dtype):
            raise UsageError(
                "The device and the dtype of a compiled model cannot change",
                got=f"a conversion to {moved.dtype} on {moved.device}",
                expected=f"{self.dtype} on {self.device}",
                hint="Pass device and dtype to tpcompile.compile, and "
                f"device={str(self.device)!r} to a pipeline",
            )
        return self

    def train(self, mode: bool = True) -> Self:
        """Raise unless `mode` is False, as in `eval`."""
        if mode:
            raise refusal("train", NO_GRADIENTS)
        model: Self = super().train(False)
        return model

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise unless `requires_grad` is False, which is a no-op."""
        if requires_grad:
            raise refusal("requires_grad_", NO_GRADIENTS)
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_to_be_moved()

    @staticmethod
    def is_remote_code() -> bool:
        """Return False; Hugging Face's `generate` calls this."""
        return False

    @staticmethod
    def get_experts_implementation() -> dict[str, str]:
        """Return {}: experts run on the ranks. Hugging Face's `generate` calls this."""
        return {}


def _not_to_be_moved() -> UnsupportedError:
    return UnsupportedError(
        "A compiled model cannot be copied or pickled: its weights are on the ranks",
        hint="Compile it again where you need it; model.save_pretrained(DIR) writes a checkpoint",
    )
