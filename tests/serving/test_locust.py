"""Locust, a load generator that people use, sees no failure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.serving.conftest import KEY, Served

USERS, REQUESTS = 16, 120
MOST_S = 240


def test_many_users_at_once(server: Served) -> None:
    command = [
        *(sys.executable, "-m", "locust", "--headless", "--json", "--host", server.url),
        *("-f", str(Path(__file__).with_name("locustfile.py"))),
        *("-u", str(USERS), "-r", str(USERS), "-t", f"{MOST_S}s", "--stop-timeout", "60"),
        *("--key", KEY, "--requests", str(REQUESTS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * MOST_S)
    assert done.returncode == 0, done.stderr + done.stdout
    statistics = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(statistics) == {"complete", "stream", "give up", "call", "choose"}
    assert sum(row["num_requests"] for row in statistics.values()) >= REQUESTS
    assert sum(row["num_failures"] for row in statistics.values()) == 0


def test_nothing_is_left_of_users_who_gave_up(server: Served) -> None:
    """Their requests end within a step, and so do their blocks."""
    scheduler = server.engine.scheduler
    end = time.monotonic() + 60
    while scheduler.running or scheduler.waiting:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert scheduler.blocks.held == 0
