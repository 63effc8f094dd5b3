"""Tests of user-defined targets: valid files, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tpcompile
from tests.backends.reference.stepping import Case
from tpcompile.errors import UsageError
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.targets import TARGETS, target_of, target_text


def test_a_file_says_what_differs_from_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"workers": 65536, "exchange_us": 1e-3}')
    target = target_of(str(path))
    assert (target.name, target.workers, target.exchange_us) == ("mine", 65_536, 1e-3)
    assert target.grain == TARGETS["cpu"].grain


def test_a_written_target_is_read_again(tmp_path: Path) -> None:
    target = replace(TARGETS["cpu"], name="mine", bytes_per_us=21_500.25, value_us=0.0)
    path = tmp_path / "other.json"
    path.write_text(target_text(target))
    assert target_of(str(path)) == target
    assert target_of(str(path), 7) == replace(target, workers=7)


def test_ranks_share_the_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpcompile.cores.cores", lambda: 6)
    assert [target_of("cpu", ranks=ranks).workers for ranks in (1, 2, 7)] == [6, 3, 1]
    assert target_of("cpu", 5, ranks=2).workers == 5
    assert target_of("h200", ranks=2) == TARGETS["h200"]


def test_an_invalid_target_is_not_written() -> None:
    with pytest.raises(UsageError, match="bytes_per_us=inf"):
        target_text(replace(TARGETS["cpu"], bytes_per_us=float("inf")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bytes_per_us": NaN}', "bytes_per_us=nan. Expected a finite number above 0"),
        ('{"exchange_us": Infinity}', "exchange_us=inf. Expected a finite number"),
        ('{"instruction_us": 1e999}', "instruction_us=inf. Expected a finite number"),
        ('{"instruction_us": true}', "instruction_us=True. Expected a finite number"),
        ('{"bytes_per_us": 1' + "0" * 400 + "}", "Expected a finite number"),
        ('{"workers": 1.5}', "workers=1.5. Expected a positive integer"),
        ('{"workers": 65537}', "workers=65,537. Expected at most 65,536"),
        ('{"grain": 2147483648}', "grain=2,147,483,648. Expected at most 2,147,483,647"),
        ('{"name": 7}', "name=7. Expected a string"),
        ('{"cores": 7}', "Found cores"),
        ('{"byte_per_us": 7}', "Did you mean bytes_per_us"),
        ('{"value_us": -1}', "value_us=-1. Expected a finite number of at least 0"),
        ("[7]", "Found [7]"),
        ("[", "cannot be read"),
    ],
)
def test_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        target_of(str(path))


def test_no_such_target() -> None:
    with pytest.raises(
        UsageError, match=r"b200\. Or give a JSON file with the fields of a target\."
    ):
        target_of("zzz")
    with pytest.raises(UsageError, match=r"^There is no file none\.json\.$"):
        target_of("none.json")


def test_too_many_workers() -> None:
    with pytest.raises(UsageError, match=r"workers=65,537\. Expected at most 65,536"):
        target_of("h200", 65_537)


def test_a_batch_costs_what_it_loads_or_what_it_computes() -> None:
    """Weights are loaded once per batch, so a few more sequences cost nothing."""
    target = target_of("h200")
    costs = {
        batch: {
            instruction.name: (instruction.cost(target), instruction.traffic, instruction.work)
            for instruction in Case(
                "tiny-qwen3", lengths=(5,) * batch, workers=2
            ).program.instructions
            if isinstance(instruction, StepInstruction)
        }
        for batch in (1, 4, 64)
    }
    for name in ("norm_qkv_rope_append", "norm_gate_up_swiglu", "linear_residual", "norm_lm_head"):
        single, few, many = (costs[batch][name] for batch in costs)
        assert single[1] == few[1] == many[1] > 0, "all batches load the same weights"
        assert 4 * single[2] == few[2] and 64 * single[2] == many[2]
        assert single[0] == few[0] < many[0]
        assert many[0] == target.instruction_us + many[2] / target.worker_macs_per_us


def test_matrix_units_multiply_weights_with_values_of_16_bits() -> None:
    """Neither attention nor products in fp32 use them."""
    target = target_of("h200")
    step = tpcompile.schedule("preset:tiny-qwen3", target=target, dtype="bfloat16", max_seq_len=64)
    rates = {
        instruction.name: instruction.macs_per_us(target)
        for instruction in step.program.instructions
    }
    assert rates["partial_attention"] == target.worker_macs_per_us
    weights = ("norm_qkv_rows", "linear_residual", "norm_gate_up_swiglu", "norm_lm_head")
    assert {rates[name] for name in weights} == {target.worker_matrix_macs_per_us}
    assert target.worker_matrix_macs_per_us > 10 * target.worker_macs_per_us
    cpu = target_of("cpu", 2)
    assert cpu.worker_matrix_macs_per_us == cpu.worker_macs_per_us
