"""The tests of this directory with other versions of Triton, each in a directory of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VERSIONS = {
    "oldest": ("triton==3.6.0", "numpy<2.4"),  # its interpreter does not know numpy 2.4
    "newest": ("triton",),
}
_RUN = """
import sys
sys.path.insert(0, {packages!r})
import pytest, triton
assert triton.__file__.startswith({packages!r}), triton.__file__
sys.exit(pytest.main([{tests!r}, "-q", "-p", "no:cacheprovider", "-n", "0"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("packages", VERSIONS.values(), ids=list(VERSIONS))
def test_another_version(packages: tuple[str, ...], tmp_path: Path) -> None:
    where = str(tmp_path / "packages")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", where]
    subprocess.run([*pip, *packages], check=True)
    code = _RUN.format(packages=where, tests=str(HERE))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
