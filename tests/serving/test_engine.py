"""Tests of the engine: every request is continued as if it ran alone."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tests.backends.reference.step_models import EXPERTS, OWN, with_lively_routers
from tests.runtime.eager_pair import enlivened, lively
from tests.serving.hybrids import CHUNK, remembering
from tpcompile.errors import UsageError
from tpcompile.runtime.ranks.step import Step
from tpcompile.serving import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_launchers")

VOCABULARY = 1013
SMALL = {"chunk": 32, "max_tokens_per_step": 64}
WIDER = {"chunk": 64, "max_tokens_per_step": 128}
"""The same for linear attention, whose chunks have at least 64 tokens."""


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as compiled:
        yield compiled


def prompt(dice: Random, length: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(length)]


def alone(model: Any, tokens: list[int], new: int) -> list[int]:
    """Continue greedily with Hugging Face's loop."""
    ids = torch.tensor([tokens])
    output = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
    continued: list[int] = output[0, len(tokens) :].tolist()
    return continued


def greedy(new: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True, **more)


def test_requests_of_all_lengths_are_those_of_a_run_alone(model: Any) -> None:
    dice = Random(1)
    with Engine(model, max_batch=5, **SMALL) as engine:
        requests = [
            (prompt(dice, n), dice.randrange(1, 12)) for n in (1, 31, 32, 33, 64, 100, 7, 65)
        ]
        handles = [engine.add(tokens, greedy(new)) for tokens, new in requests]
        for (tokens, new), handle in zip(requests, handles, strict=True):
            (completion,) = handle.result()
            assert (completion.tokens, completion.finish) == (alone(model, tokens, new), "length")
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks


def mixed(
    model: Any,
    seed: int,
    chunk: int = 32,
    salts: Many[Hashable] = (None,),
    kv_tokens: int | None = None,
) -> int:
    """Run requests of all lengths that arrive at random; compare each with a run alone.

    By default there is so little room for keys and values that requests are preempted. Return the
    number of requests.
    """
    dice = Random(seed)
    limit, common = model.max_seq_len, prompt(dice, 3 * chunk)
    waiting = []
    for number in range(10):
        known = dice.choice([0, 0, chunk + 1, 2 * chunk + 6, 3 * chunk])
        tokens = common[:known] + prompt(dice, dice.randrange(1, 60))
        most = limit - len(tokens)
        new = dice.choice([1, dice.randrange(1, 20), most]) if most < 30 else dice.randrange(1, 20)
        drawn = {"temperature": 0.8, "seed": number, "top_k": 50} if dice.random() < 0.5 else {}
        waiting.append((tokens, greedy(min(new, most), n=dice.choice([1, 1, 2]), **drawn)))
    waiting.append((prompt(dice, dice.choice([1, limit - 1])), greedy(1)))
    little, begun = chunk * dice.randrange(6, 9), list[tuple[Any, bool]]()
    options = {"max_batch": 4, "chunk": chunk}
    few = {
        "kv_tokens": kv_tokens or little,
        "max_tokens_per_step": 2 * chunk,
        "snapshots": seed % 5,
    }
    with Engine(model, **options, **few) as engine:
        todo = list(zip(waiting, cycle(salts), strict=False))
        while todo or engine.step():
            if todo and dice.random() < 0.4:
                request, salt = todo.pop(0)
                begun.append((engine.add(*request, salt=salt), False))
            if begun and dice.random() < 0.05:
                begun[-1][0].abort()
                begun[-1] = begun[-1][0], True
        answers = [handle.result() for handle, _ in begun]
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks
        assert engine.scheduler.states.available == engine.scheduler.limits.states
    with Engine(model, **options) as quiet:
        for number, ((tokens, params), (_, aborted)) in enumerate(zip(waiting, begun, strict=True)):
            wanted = quiet.add(tokens, params, salt=number).result()
            for completion, right in zip(answers[number], wanted, strict=True):
                assert completion.tokens == (
                    right.tokens[: len(completion.tokens)] if aborted else right.tokens
                )
    return len(waiting)


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes(model: Any, seed: int) -> None:
    """Arrivals, shared prefixes, aborts, little memory and seeds change no token."""
    mixed(model, seed)


def test_a_cache_in_int8() -> None:
    """Shared, copied and preempted blocks hold the scales of their rows."""
    with tpcompile.compile(lively("tiny-qwen3"), tp=2, max_seq_len=160, kv="int8") as model:
        for seed in range(2):
            mixed(model, seed)
        test_a_shared_prefix(model)
        test_a_request_that_is_preempted(model)
        test_bits_do_not_depend_on_the_batch(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_mixes_with_experts(dtype: torch.dtype) -> None:
    """Rows of an expert are those of any tokens. In bf16 they share runs, in fp32 they do not.

    In bf16 nothing is preempted, since tokens that are computed again as a prompt are rounded
    otherwise.
    """
    config = AutoConfig.for_model(**{**OWN[EXPERTS], "vocab_size": VOCABULARY})
    eager = with_lively_routers(enlivened(config)).to(dtype)
    with tpcompile.compile(eager, max_seq_len=160) as model:
        for seed in range(3):
            mixed(model, seed, kv_tokens=None if dtype == torch.float32 else 1280)


@pytest.fixture(scope="module", params=[1, 2])
def hybrid(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    """A model with linear attention, also on two simulated ranks."""
    tp = request.param
    with tpcompile.compile(
        remembering(), tp, max_seq_len=300, backend="torch", simulate=tp > 1
    ) as compiled:
        yield compiled


SALTS = (None, "a", "b")


@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_with_states(hybrid: Any, seed: int) -> None:
    """Snapshots, shared and copied states and new starts change no token."""
    mixed(hybrid, seed, CHUNK, SALTS)


@pytest.mark.slow
def test_two_hundred_requests_with_states(hybrid: Any) -> None:
    assert sum(mixed(hybrid, seed, CHUNK, SALTS) for seed in range(20)) >= 200


def test_pieces_have_the_tokens_of_a_run_alone(hybrid: Any) -> None:
    """Whole chunks, tails of a single token, and new tokens in the company of others."""
    dice = Random(1)
    lengths = (1, 2, 63, 64, 65, 127, 128, 129, 192, 193, 257)
    with Engine(hybrid, max_batch=5, **WIDER) as engine:
        requests = [(prompt(dice, n), dice.randrange(8, 24)) for n in lengths]
        handles = [engine.add(tokens, greedy(new)) for tokens, new in requests]
        for (tokens, new), handle in zip(requests, handles, strict=True):
            assert handle.result()[0].tokens == alone(hybrid, tokens, new)


def test_chunks_of_linear_attention_are_long_enough(hybrid: Any) -> None:
    """A cut elsewhere than at multiples of 64 would give other bits than a run alone."""
    for requested, chunk in ((1, 64), (64, 64), (65, 128), (128, 128)):
        with Engine(hybrid, max_batch=2, chunk=requested) as engine:
            assert engine.scheduler.limits.chunk == chunk


def test_a_prefix_with_a_snapshot(hybrid: Any) -> None:
    dice = Random(3)
    common = prompt(dice, 200)
    with Engine(hybrid, max_batch=2, **WIDER) as engine:
        first = engine.add([*common, 1], greedy(3))
        first.result()
        second = engine.add([*common, 2], greedy(9))
        third = engine.add([*common[:150], 2], greedy(9))
        other = engine.add([*common, 2], greedy(9), salt="another tenant")
        assert second.result()[0].tokens == alone(hybrid, [*common, 2], 9)
        assert third.result()[0].tokens == alone(hybrid, [*common[:150], 2], 9)
        assert other.result()[0].tokens == alone(hybrid, [*common, 2], 9)
        shared = [handle.shared for handle in (first, second, third, other)]
        assert shared == [0, 192, 0, 0], "there is no snapshot after 128 tokens"
        assert engine.add([*common[:150], 3], greedy(1)).result()
        again = engine.add([*common[:150], 4], greedy(9))
        assert again.result()[0].tokens == alone(hybrid, [*common[:150], 4], 9)
        assert again.shared == 128, "but there is one where the third parted with the first"
        assert engine.state().startswith("0 running, 0 waiting, 0 of ")
        assert ", 3 snapshots, " in engine.state()


def test_a_snapshot_changes_no_bit(hybrid: Any) -> None:
    dice = Random(11)
    with Engine(hybrid, max_batch=4, **WIDER) as engine:
        for length in (65, 129, 160, 193, 257):
            request = prompt(dice, length), greedy(1, logprobs=3)
            alone, again = engine.add(*request, salt="alone"), engine.add(*request)
            handles = [alone, again, engine.add(prompt(dice, 90), greedy(9))]
            handles[-1].result()
            handles.append(engine.add(*request))
            chosen = [handle.result()[0].chosen for handle in handles]
            assert chosen[0] == chosen[1] == chosen[3]
            assert (again.shared, handles[3].shared) == (0, (length - 1) // 64 * 64)


def _assert_continued(model: Any, length: int, most: int, sizes: dict[str, Any]) -> None:
    """Assert that three continuations of a prompt differ, and are the same again and in turn."""
    tokens = prompt(Random(7), length)
    params = SamplingParams(max_tokens=most, n=3, temperature=1.0, seed=3, ignore_eos=True)
    with Engine(model, max_batch=4, **sizes) as engine:
        texts = [completion.tokens for completion in engine.add(tokens, params).result()]
        assert len({tuple(text) for text in texts}) == 3
        assert [completion.tokens for completion in engine.add(tokens, params).result()] == texts
    with Engine(model, max_batch=1, **sizes) as engine:  # one after another, without a fork
        assert [completion.tokens for completion in engine.add(tokens, params).result()] == texts


def test_several_continuations_share_the_state_of_a_prompt(hybrid: Any) -> None:
    _assert_continued(hybrid, 135, 9, WIDER)


def test_a_step_that_fails_leaves_no_state_behind(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = Random(8)
    tokens = prompt(dice, 140)
    with Engine(hybrid, max_batch=3, **WIDER) as engine:
        wanted = engine.add(tokens, greedy(9)).result()[0].tokens
        failing, run = engine.add(prompt(dice, 90), greedy(9)), hybrid.run_step
        engine.step()

        def fail(step: object) -> None:
            run(step)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(hybrid, "run_step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            failing.result()
        assert engine.scheduler.states.held == 0
        monkeypatch.setattr(hybrid, "run_step", run)
        handle = engine.add(tokens, greedy(9))
        assert handle.result()[0].tokens == wanted and handle.shared == 128


def test_a_wrong_state_changes_tokens(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice it: here a prompt goes on from the snapshot of another one."""
    tokens, run = prompt(Random(9), 200), hybrid.run_step
    wrong: list[torch.Tensor] = []

    def running(step: Step) -> torch.Tensor:
        read = step.inputs["read"]
        if not wrong and int(step.inputs["starts"][1]) == 200 - 192:
            wrong.append(read)
            read = torch.where(read == 0, 1, 0)
        output: torch.Tensor = run(replace(step, inputs={**step.inputs, "read": read}))
        return output

    with Engine(hybrid, max_batch=2, **WIDER) as engine:
        wanted = engine.add(tokens, greedy(9)).result()[0].tokens
        assert engine.add(tokens, greedy(9)).result()[0].tokens == wanted
        monkeypatch.setattr(hybrid, "run_step", running)
        assert engine.add(tokens, greedy(9)).result()[0].tokens != wanted
        assert wrong and engine.add(tokens, greedy(9)).result()[0].tokens == wanted


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_five_hundred_random_mixes(tp: int) -> None:
    with tpcompile.compile(lively("tiny-qwen3"), tp, max_seq_len=160) as model:
        for seed in range(500):
            mixed(model, seed)


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_in_processes(tp: int) -> None:
    eager, dice = lively("tiny-qwen3"), Random(2)
    prompts = [prompt(dice, n) for n in (3, 40, 70)]
    with tpcompile.compile(eager, tp, max_seq_len=160) as model:
        with Engine(model, max_batch=3, **SMALL) as engine:
            handles = [engine.add(tokens, greedy(6)) for tokens in prompts]
            continuations = [handle.result()[0].tokens for handle in handles]
        mixed(model, seed=tp)
    assert continuations == [alone(eager, tokens, 6) for tokens in prompts]


def test_a_shared_prefix(model: Any) -> None:
    dice = Random(3)
    common = prompt(dice, 96)
    with Engine(model, max_batch=2, **SMALL) as engine:
        first = engine.add([*common, 1], greedy(3))
        first.result()
        second = engine.add([*common, 2], greedy(3))
        other = engine.add([*common, 2], greedy(3), salt="another tenant")
        assert second.result()[0].tokens == alone(model, [*common, 2], 3)
        assert other.result()[0].tokens == alone(model, [*common, 2], 3)
        assert (first.shared, second.shared, other.shared) == (0, 96, 0)


def test_a_request_that_is_preempted(model: Any) -> None:
    """There is room for one sequence and a half; the second is computed again."""
    dice = Random(4)
    prompts = [prompt(dice, 60), prompt(dice, 30)]
    with Engine(model, max_batch=2, kv_tokens=128, **SMALL) as engine:
        handles = [engine.add(tokens, greedy(40)) for tokens in prompts]
        lost = 0
        while engine.step():
            lost += any(len(sequence.tokens) > 30 + 1 for sequence in engine.scheduler.waiting)
        assert lost, "the second one must have been preempted"
        for tokens, handle in zip(prompts, handles, strict=True):
            assert handle.result()[0].tokens == alone(model, tokens, 40)


def test_bits_do_not_depend_on_the_batch(model: Any) -> None:
    """The log-probabilities of a request have the same bits in any company."""
    dice = Random(5)
    tokens, params = prompt(dice, 40), greedy(8, logprobs=3)
    with Engine(model, max_batch=8, **SMALL) as engine:
        wanted = engine.add(tokens, params).result()[0].chosen
        handles = [engine.add(prompt(dice, 20 + n), greedy(9)) for n in range(6)]
        chosen = engine.add(tokens, params).result()[0].chosen
        assert chosen == wanted
        for handle in handles:
            handle.abort()


def test_log_probabilities_are_those_of_the_model(model: Any) -> None:
    tokens = prompt(Random(6), 20)
    with Engine(model) as engine:
        (completion,) = engine.add(tokens, greedy(1, logprobs=5)).result()
    logits = model(torch.tensor([tokens])).logits[0, -1].float()
    wanted = torch.log_softmax(logits, 0)
    (chosen,) = completion.chosen
    assert chosen.logprob == pytest.approx(float(wanted.max()), abs=1e-4)
    assert [token for token, _ in chosen.top] == wanted.topk(5).indices.tolist()


def test_several_continuations_of_one_prompt(model: Any) -> None:
    _assert_continued(model, 45, 6, SMALL)


def test_sampling_without_a_seed_differs(model: Any) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    with Engine(model) as engine:
        continuations = [engine.add([1, 2, 3], params).result()[0].tokens for _ in range(3)]
    assert len({tuple(continuation) for continuation in continuations}) > 1


def test_tokens_that_end_a_request(model: Any) -> None:
    tokens = prompt(Random(8), 10)
    whole = alone(model, tokens, 8)
    with Engine(model) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True, stop_tokens=(whole[3],))
        (completion,) = engine.add(tokens, params).result()
        place = whole.index(whole[3])
        assert (completion.tokens, completion.finish) == (whole[: place + 1], "stop")
        params = SamplingParams(max_tokens=8, min_tokens=6, stop_tokens=(whole[3],))
        (completion,) = engine.add(tokens, params).result()
        assert len(completion.tokens) >= 6 and whole[3] not in completion.tokens[:6]


def test_an_aborted_request_frees_its_blocks(model: Any) -> None:
    with Engine(model, max_batch=2, **SMALL) as engine:
        other, gone = (engine.add(prompt(Random(n), 50), greedy(30)) for n in (1, 2))
        for _ in range(4):
            engine.step()
        free = engine.scheduler.blocks.available
        gone.abort()
        engine.step()
        assert engine.scheduler.blocks.available >= free + 1
        (completion,) = gone.result()
        assert completion.finish == "abort" and 0 < len(completion.tokens) < 30
        assert len(other.result()[0].tokens) == 30


def test_asyncio(model: Any) -> None:
    async def stream(engine: Engine, tokens: list[int]) -> list[int]:
        return [event.chosen.token async for event in engine.add(tokens, greedy(5)) if event.chosen]

    async def all_of(engine: Engine) -> list[Any]:
        prompts = [prompt(Random(n), 10 + n) for n in range(5)]
        streams = await asyncio.gather(*(stream(engine, tokens) for tokens in prompts))
        (last,) = await engine.add(prompts[0], greedy(5))
        assert last.tokens == streams[0]
        return list(zip(prompts, streams, strict=True))

    with Engine(model, max_batch=3, **SMALL) as engine:  # `async for` starts its thread
        streams = asyncio.run(all_of(engine))
    for tokens, new in streams:
        assert new == alone(model, tokens, 5)


def test_a_caller_whose_loop_has_ended(model: Any) -> None:
    """It does not disturb other requests."""

    async def leave(engine: Engine) -> None:
        async for _ in engine.add([1, 2, 3], greedy(40)):
            break

    with Engine(model, max_batch=3, **SMALL).start() as engine:
        asyncio.run(leave(engine))
        tokens = prompt(Random(1), 20)
        assert engine.add(tokens, greedy(30)).result()[0].tokens == alone(model, tokens, 30)


def test_an_error_of_the_model_reaches_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=64) as model, Engine(model) as engine:
        handles = [engine.add([1, 2, 3], greedy(5)) for _ in range(2)]

        def fail(step: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(model, "run_step", fail)
        for handle in handles:
            with pytest.raises(RuntimeError, match="out of memory"):
                handle.result()
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks


BAD = {
    "empty": ([], {}, "at least one"),
    "outside": ([1, VOCABULARY], {}, "from 0 to 1012"),
    "long": ([1] * 160, {}, "at most 159 tokens"),
    "text": ("hello", {}, "needs an engine with a tokenizer"),
    "end": ([1], {"stop_tokens": (VOCABULARY,)}, "must be from 0 to 1012, got 1013"),
    "negative end": ([1], {"stop_tokens": [-1], "min_tokens": 1}, "must be from 0 to 1012, got -1"),
    "huge end": ([1], {"stop_tokens": (1, 10**30)}, f"must be from 0 to 1012, got {10**30}"),
    "stop": ([1], {"stop": "x"}, "Stop texts need an engine with a tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(model: Any, name: str) -> None:
    tokens, options, message = BAD[name]
    with Engine(model) as engine, pytest.raises(UsageError, match=message):
        engine.add(tokens, SamplingParams(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        (
            {"temperature": 1e-310},
            r"temperature must be 0 \(greedy\), or a number from 1e-05 to 100",
        ),
        ({"temperature": 9.9e-6}, "got 9.9e-06"),
        ({"stop_tokens": (True,)}, "stop_tokens must be token ids"),
        ({"top_p": 0}, "top_p must be"),
        ({"n": True}, "n must be an integer from 1 to 128, got True"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be at most max_tokens"),
        ({"stop": ("",)}, "stop must consist of texts"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


def test_a_salt_that_is_not_hashable(model: Any) -> None:
    salt: Any = ("tenant", [])
    with Engine(model) as engine, pytest.raises(UsageError, match="salt must be hashable"):
        engine.add([1], salt=salt)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-5, "repetition_penalty": 1e-9, "top_k": 10**30},
        {"temperature": 100, "repetition_penalty": 100, "presence_penalty": 2},
        {"temperature": 1, "min_p": 1, "top_p": 1e-9, "frequency_penalty": -2},
        {"temperature": 1, "stop_tokens": [VOCABULARY - 1, 0, 0], "min_tokens": 2},
        {"temperature": 1, "seed": 2**63 - 1, "min_tokens": 3, "logprobs": 20},
    ],
)
def test_the_limits_of_options(model: Any, options: dict[str, Any]) -> None:
    with Engine(model) as engine:
        (completion,) = engine.add([1, 2, 3], SamplingParams(max_tokens=4, **options)).result()
    assert 1 <= len(completion.tokens) <= 4


def test_a_closed_engine(model: Any) -> None:
    engine = Engine(model)
    handle = engine.add([1, 2], greedy(4))
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.add([1], greedy(1))
    with pytest.raises(UsageError, match="closed"):
        handle.result()
    assert alone(model, [1, 2], 2), "the model is still open"
