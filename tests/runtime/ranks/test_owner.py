"""Ranks belong to one process: forks are refused, and the owner's results remain correct.

A single script tests this and compiling without standard streams, since starting the ranks'
interpreters takes most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpcompile.errors import UsageError
from tpcompile.runtime.ranks.owner import Owner, check_open

ROOT = Path(__file__).parents[3]
LIMIT_S = 300
"""Far more than the script takes; a fork that hangs ends earlier by itself."""

_SCRIPT = """
import fcntl, gc, json, os, signal, sys, traceback
sys.path.insert(0, {root!r})
out = os.fdopen(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10), "w")

def tell(**line):
    print(json.dumps(line), file=out, flush=True)

def is_open(file):
    try:
        os.fstat(file)
    except OSError:
        return False
    return True

def main():
    import torch, tpcompile
    from tests.runtime.ranks.tiny_ranks import Doubled, modules, step
    from tpcompile import CompileError
    from tpcompile.runtime.ranks.spawned import SpawnedRanks

    ids = torch.arange(40, 50)[None]

    def text(model):
        return model.generate(ids, max_new_tokens=4, min_new_tokens=4)[0].tolist()

    def compiled(**options):
        return tpcompile.compile("preset:tiny-qwen3", random_weights=0, max_seq_len=64, **options)

    alone = compiled(tp=1)
    expected = text(alone)
    ranks = SpawnedRanks(1)
    ranks.load(modules(1), None, Doubled)
    right = ranks.run(step(x=torch.tensor([9]))).tolist() == [9]
    ranks.close()
    tell(streams=[is_open(file) for file in range(3)], right=right)
    for file in range(3):
        if is_open(file):
            os.close(file)
    sys.stdin = sys.stdout = sys.stderr = None  # as Python finds them when they are closed
    models = dict(workers=compiled(tp=2), threads=compiled(tp=2, simulate=True), alone=alone)
    tell(streams=[is_open(file) for file in range(3)], right=text(models["workers"]) == expected)
    caches = {{name: model(ids, use_cache=True).past_key_values for name, model in models.items()}}
    parameter = "model.layers.0.input_layernorm.weight"

    def calls(name):
        model, last = models[name], steps[name]
        ranks = model._ranks
        yield "forward", lambda: model(ids)
        yield "decode", lambda: model(ids[:, :1], past_key_values=caches[name])
        yield "greedy", lambda: model(ids, greedy=True)
        yield "generate", lambda: model.generate(ids, max_new_tokens=1)
        yield "gather", lambda: model.gather_weight(parameter)
        yield "parameter", lambda: ranks.parameter(0, parameter)
        yield "run", lambda: ranks.run(last)
        yield "all", lambda: ranks.run_all(last)

    steps = {{}}
    for name, model in models.items():
        def kept(step, name=name, run=model._ranks.run):
            steps[name] = step
            return run(step)
        model._ranks.run = kept
        model(ids, use_cache=False)
        del model._ranks.run

    def fork(number):
        signal.alarm(60)  # a call that hangs
        for name in models:
            answers = {{}}
            for method, call in calls(name):
                try:
                    answers[method] = "answered " + type(call()).__name__
                except CompileError as error:
                    answers[method] = type(error).__name__ + " " + error.message
            source = len(models[name].source(0)) > 0
            tell(fork=os.getpid(), ranks=name, answers=answers, source=source)
        if number == 0:
            sys.exit(0)  # finalizers alone
        if number == 1:
            for model in models.values():
                model.close()
                model.close()
            sys.exit(0)
        if number == 2:
            models.clear()
            caches.clear()
            gc.collect()
        os._exit(0)

    held = [models["workers"]._ranks._modules._lock, models["threads"]._ranks._modules._group.lock]
    for number in range(10):
        for lock in held:  # as if another thread were in a call
            lock.acquire()
        pid = os.fork()
        if pid == 0:
            fork(number)
        for lock in held:
            lock.release()
        texts = [text(models["workers"]) for _ in range(2)]  # while the fork asks too
        status = os.waitpid(pid, 0)[1]
        texts += [text(model) for name, model in models.items() if number == 1 or name == "workers"]
        tell(status=status, right=texts == [expected] * len(texts))
        if status:
            break

try:
    main()
except BaseException as error:
    if not isinstance(error, SystemExit):
        traceback.print_exc(file=out)
    out.flush()
    raise
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the script's output, one object per line; it starts without standard input."""
    script = tmp_path_factory.mktemp("owner") / "script.py"
    script.write_text(_SCRIPT.format(root=str(ROOT)))
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -W error "$1" <&-', sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_compiles_without_standard_streams(told: list[dict[str, Any]]) -> None:
    """Models compile without stdin, and without any standard stream; no file takes their place."""
    lines = [line for line in told if "streams" in line]
    assert [line["streams"] for line in lines] == [[False, True, True], [False] * 3]
    assert all(line["right"] for line in lines)


def test_a_fork_is_refused_by_every_method(told: list[dict[str, Any]]) -> None:
    """Forks are refused, also during a call in the owner; sources remain readable."""
    lines = [line for line in told if "fork" in line]
    assert [line["ranks"] for line in lines] == ["workers", "threads", "alone"] * 10
    for line in lines:
        for method, answer in line["answers"].items():
            message = f"; this is process {line['fork']}, forked from it"
            assert answer.startswith("UsageError The model belongs to process "), (line, method)
            assert answer.endswith(message), (line, method)
        assert len(line["answers"]) == 8
        assert line["source"]


def test_the_owner_is_right_whatever_a_fork_does(told: list[dict[str, Any]]) -> None:
    """A fork exits normally: at the end, after `close`, and after models are collected."""
    lines = [line for line in told if "status" in line]
    assert [line["status"] for line in lines] == [0] * 10
    assert all(line["right"] for line in lines)


def test_owner() -> None:
    owner = Owner()
    assert owner.here and owner.refusal == ""
    owner.check()
    other = Owner(os.getppid())
    assert not other.here
    with pytest.raises(
        UsageError, match=rf"belongs to process {other.pid}; this is .* {owner.pid}"
    ):
        other.check()


def test_closed_ranks_are_refused_with_their_reason() -> None:
    check_open("")
    with pytest.raises(UsageError, match=r"The model is closed\. Compile it again"):
        check_open("The model is closed")
