"""What benchmarks print: only the result, on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any


def write_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
