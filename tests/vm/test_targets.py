"""Targets of one's own: what a file may say, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpcompile.errors import UsageError
from tpcompile.vm.targets import TARGETS, target_of


def test_a_file_says_what_differs_from_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"workers": 65536, "exchange_us": 1e-3}')
    found = target_of(str(path))
    assert (found.name, found.workers, found.exchange_us) == ("mine", 65_536, 1e-3)
    assert found.grain == TARGETS["cpu"].grain


@pytest.mark.parametrize(
    ("text", "said"),
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
        ("[", "cannot be read"),
    ],
)
def test_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
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
