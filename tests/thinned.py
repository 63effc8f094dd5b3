"""Tests with many cases that take long, of which some run by default, and all with --slow.

The cases of such a test are combinations of the same few things, such as models, dtypes and vector
paths. One in so many runs: each of these things occurs, with some of the others.
Tests of kinds of mistakes are not listed: each kind runs.

The kernels of a vector path and a dtype take up to a minute to build. Where paths share them, one
path runs. Those of fp16 differ from others in loads and stores alone, and run on the fastest path.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch

from tpcompile.backends.native.build import path_of_kernels, paths

ONE_IN: dict[str, int] = {
    "tests/backends/native/test_attention.py::test_spans_are_those_of_the_reference_machine": 2,
    "tests/backends/native/test_grouped.py::test_bits_do_not_depend_on_batch_workers_and_ranks": 4,
    "tests/backends/native/test_grouped.py::test_bits_do_not_depend_on_the_path": 2,
    "tests/backends/native/test_grouped.py::test_embeddings_are_the_reference_s": 4,
    "tests/backends/native/test_grouped.py::test_steps_are_the_reference_s": 2,
    "tests/backends/native/test_grouped.py::test_sums_do_not_depend_on_the_batch": 4,
    "tests/backends/native/test_grouped.py::test_terms_are_exact": 6,
    "tests/backends/native/test_native.py::test_a_cache_in_int8": 2,
    "tests/backends/native/test_native.py::test_bits_do_not_depend_on_the_batch": 2,
    "tests/backends/native/test_native.py::test_bits_do_not_depend_on_the_schedule": 2,
    "tests/backends/native/test_native.py::test_bits_of_long_rows_do_not_depend_on_the_batch": 2,
    "tests/backends/native/test_native.py::test_steps_are_eager_s": 2,
    "tests/backends/native/test_rows.py::test_rows_have_the_bits_of_steps": 2,
    "tests/backends/native/test_waiting.py::test_bits_beside_busy_processes": 2,
    "tests/backends/reference/test_machine.py::test_a_cache_in_int8": 3,
    "tests/backends/reference/test_machine.py::test_a_weight_each": 2,
    "tests/backends/reference/test_machine.py::test_bits_do_not_depend_on_the_schedule": 2,
    "tests/backends/reference/test_machine.py::test_bits_with_an_adversary": 2,
    "tests/backends/reference/test_machine.py::test_every_way": 4,
    "tests/backends/reference/test_machine.py::test_experts": 4,
    "tests/backends/reference/test_machine.py::test_heads_of_every_preset": 4,
    "tests/backends/reference/test_machine.py::test_heads_on_several_ranks": 4,
    "tests/backends/reference/test_machine.py::test_one_sequence": 3,
    "tests/backends/reference/test_ranks.py::test_bits_do_not_depend_on_the_ranks": 2,
    "tests/backends/reference/test_rows.py::test_rows_have_the_bits_of_steps": 2,
    "tests/backends/test_activations.py::test_native_steps_are_eager_s_for_any_schedule": 2,
    "tests/backends/test_executor.py::test_steps_are_eager_s": 2,
    "tests/backends/test_executor.py::test_values_are_the_reference_machine_s": 2,
    "tests/backends/triton/test_triton.py::test_steps_are_those_of_the_reference_machine": 2,
    "tests/browser/test_accessibility.py::test_no_serious_problem": 2,
    "tests/compare/program/test_case.py::test_programs_agree_step_by_step": 2,
    "tests/demo/test_model.py::test_native_tokens_of_few_bits_equal_those_of_transformers": 2,
    "tests/frontend/test_capture.py::test_families": 2,
    "tests/frontend/test_every_class.py::test_equal_or_refused_by_name": 4,
    "tests/frontend/test_masks.py::test_windows_as_in_eager": 3,
    "tests/gguf/test_experts.py::test_programs": 2,
    "tests/gguf/test_linear_attention.py::test_logits": 2,
    "tests/gguf/test_models.py::test_logits": 4,
    "tests/ir/test_checker.py::test_good_graphs_have_no_problem": 2,
    "tests/passes/test_every_pass.py::test_numbers": 2,
    "tests/passes/test_fuse_delta.py::test_numbers": 2,
    "tests/passes/test_greedy_head.py::test_numbers": 2,
    "tests/passes/test_split_attention.py::test_numbers": 2,
    "tests/passes/test_values.py::test_every_value_of_every_stage_is_that_of_the_captured_node": 2,
    "tests/runtime/ranks/test_real_ranks.py::test_bf16": 2,
    "tests/runtime/ranks/test_real_ranks.py::test_fp32": 2,
    "tests/runtime/test_activations.py::test_logits_are_eager_s_for_any_tp": 2,
    "tests/runtime/test_adapter.py::test_every_family_and_dtype": 2,
    "tests/runtime/test_adapter.py::test_numbers_are_those_of_merge_and_unload": 3,
    "tests/runtime/test_compressed.py::test_logits": 2,
    "tests/runtime/test_compressed.py::test_other_scales_and_offsets_are_noticed": 2,
    "tests/runtime/test_compressed.py::test_saved_tensors": 2,
    "tests/runtime/test_compressed_apart.py::test_comparison_of_a_program_of_several_formats": 2,
    "tests/runtime/test_compressed_apart.py::test_fused_weights_of_several_formats": 3,
    "tests/runtime/test_compressed_apart.py::test_programs_of_several_formats": 2,
    "tests/runtime/test_experts_few_bits.py::test_a_checkpoint_is_its_values": 2,
    "tests/runtime/test_float8.py::test_logits": 2,
    "tests/runtime/test_float8.py::test_saved_tensors": 2,
    "tests/runtime/test_guessed.py::test_guesses_from_the_prompt": 4,
    "tests/runtime/test_packed.py::test_logits": 2,
    "tests/runtime/test_packed.py::test_saved_tensors": 2,
    "tests/runtime/test_quantizing.py::test_components_are_those_of_every_tp": 3,
    "tests/runtime/test_router_logits.py::test_prompts_and_tokens_with_a_cache": 2,
    "tests/serving/test_engine.py::test_random_mixes_with_states": 2,
    "tests/serving/test_required.py::test_required_calls": 2,
    "tests/test_hybrids.py::test_each_amplified_error_is_about_eager_s": 5,
    "tests/test_hybrids.py::test_any_configuration_at_any_tp": 3,
    "tests/test_hybrids.py::test_programs_continue_prompts_of_qwen3_next": 2,
    "tests/test_layer_by_layer.py::test_attention_and_mlp_of_every_layer": 2,
    "tests/test_mixtures.py::test_any_configuration_at_any_tp_with_any_plan": 2,
    "tests/test_presets.py::test_logits_are_those_of_eager": 5,
    "tests/vm/groups/test_instructions.py::test_lowering_makes_it_and_what_it_touches_is_there": 2,
    "tests/vm/groups/test_meaning.py::test_meanings_give_what_instructions_store": 2,
    "tests/vm/proof/test_computes.py::test_programs_compute_their_graph": 2,
    "tests/vm/proof/test_expected.py::test_lowered_buffers_fit_the_graph": 2,
    "tests/vm/schedule/test_layers.py::test_a_model_gives_the_same_program_with_copies": 2,
}
"""The functions, and how many of their cases there are for each one that runs."""
_GOLDEN = 0.6180339887498949
"""The golden ratio. Its multiples are spread evenly and follow no period of the parameters."""


def left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that do not run.

    The first case of each function in the list runs. So does the first one that has a value of a
    parameter, if other cases have that value too, and those that run by number do not.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if _needs_other_kernels(item):
            yield item
        elif function in ONE_IN and item.get_closest_marker("slow") is None:
            cases[function].append(item)
    for function, group in cases.items():
        several = {
            value for value, count in Counter(chain(*map(_values, group))).items() if count > 1
        }
        runs = [number * _GOLDEN % 1 < 1 / ONE_IN[function] for number in range(len(group))]
        missing = several.difference(
            *(_values(case) for case, chosen in zip(group, runs, strict=True) if chosen)
        )
        for item, chosen in zip(group, runs, strict=True):
            if not chosen and missing.isdisjoint(_values(item)):
                yield item
            missing.difference_update(_values(item))


def _needs_other_kernels(item: pytest.Item) -> bool:
    """Return whether a case is for a vector path and a dtype that do not run by default."""
    case = getattr(item, "callspec", None)
    if case is None or not {"path", "dtype"} <= case.params.keys():
        return False
    path, dtype = case.params["path"], case.params["dtype"]
    chosen = paths()[0] if dtype == torch.float16 else path
    return bool(path != path_of_kernels(chosen, dtype))


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the values of a case's parameters, by their names."""
    case = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in case.params.items()} if case else set()
