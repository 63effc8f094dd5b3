"""Tests of the server with clients that people use, over real connections."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.serving.conftest import KEY, Served, post
from tpcompile.serving.sampling import Chosen, Sampler
from tpcompile.serving.server.app import application
from tpcompile.serving.server.options import Options

PROMPT = "Anna is a baker . Felix"


def client(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, **options)


def measured(served: Served) -> str:
    return httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text


def eager_text(served: Served, prompt: str, new: int) -> str:
    ids = served.tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = served.eager.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
    text: str = served.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text


GREEDY: dict[str, Any] = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


def test_completions(served: Served) -> None:
    completion = client(served).completions.create(prompt=PROMPT, **GREEDY)
    assert completion.choices[0].text == eager_text(served, PROMPT, 12)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 12


def test_a_stream_is_the_same_text(served: Served) -> None:
    stream = client(served).completions.create(
        prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    pieces = list(stream)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == eager_text(served, PROMPT, 12)
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 12
    assert [p.choices[0].finish_reason for p in pieces[:-1]] == [None] * 11 + ["length"]


def test_several_prompts_as_text_and_as_tokens(served: Served) -> None:
    texts = [PROMPT, "The grey cat", "One rainy morning"]
    ids = [served.tokenizer(text)["input_ids"] for text in texts]
    for prompt in (texts, ids):
        completion = client(served).completions.create(prompt=prompt, n=2, **GREEDY)
        assert [choice.index for choice in completion.choices] == list(range(6))
        for choice in completion.choices:
            assert choice.text == eager_text(served, texts[choice.index // 2], 12)


def test_chat(served: Served) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    completion = client(served).chat.completions.create(messages=messages, **GREEDY)
    assert completion.choices[0].message.content == eager_text(served, PROMPT + " ", 12)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    stream = client(served).chat.completions.create(messages=parts, stream=True, **GREEDY)
    pieces = [piece.choices[0] for piece in stream]
    assert pieces[0].delta.role == "assistant"
    text = "".join(piece.delta.content or "" for piece in pieces)
    assert text == completion.choices[0].message.content
    assert pieces[-1].finish_reason == "length"


def test_an_async_client_with_many_streams(served: Served) -> None:
    async def complete(session: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await session.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([piece.choices[0].text async for piece in stream])

    async def all_of(prompts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as session:
            return await asyncio.gather(*(complete(session, prompt) for prompt in prompts))

    prompts = [f"{PROMPT} {word}" for word in ("is", "has", "and", "the", "a", "one", "cat")]
    assert asyncio.run(all_of(prompts)) == [eager_text(served, text, 12) for text in prompts]


def test_log_probabilities_and_echo(served: Served) -> None:
    """The prompt's log-probabilities are those of the model, also if its blocks are known."""
    ids = served.tokenizer(" ".join([PROMPT] * 6))["input_ids"]
    assert len(ids) > 32
    with torch.inference_mode():
        wanted = torch.log_softmax(served.eager(torch.tensor([ids])).logits[0].float(), -1)
    for _ in range(2):
        completion = client(served).completions.create(
            prompt=ids, echo=True, logprobs=3, **{**GREEDY, "max_tokens": 1}
        )
        logprobs = completion.choices[0].logprobs
        assert (
            logprobs is not None
            and logprobs.token_logprobs is not None
            and logprobs.top_logprobs is not None
        )
        assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(ids) + 1
        for place, token in enumerate(ids[1:], 1):
            assert logprobs.token_logprobs[place] == pytest.approx(
                float(wanted[place - 1, token]), abs=1e-4
            )
        best = wanted[-1].max()
        assert logprobs.token_logprobs[-1] == pytest.approx(float(best), abs=1e-4)
        assert max(logprobs.top_logprobs[-1].values()) == pytest.approx(float(best), abs=1e-4)
        assert completion.choices[0].text.startswith(served.tokenizer.decode(ids))


def test_only_the_prompt_is_wanted(served: Served) -> None:
    """Nothing is added to the prompt, in one piece and in a stream."""
    options: dict[str, Any] = {"prompt": PROMPT, "logprobs": 1, **GREEDY, "max_tokens": 0}
    completion = client(served).completions.create(echo=True, **options)
    assert completion.choices[0].text == PROMPT and completion.choices[0].finish_reason == "length"
    assert completion.usage is not None and completion.usage.completion_tokens == 0
    stream = client(served).completions.create(
        echo=True, stream=True, stream_options={"include_usage": True}, **options
    )
    *pieces, last = stream
    assert "".join(piece.choices[0].text for piece in pieces) == PROMPT
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 0
    assert client(served).completions.create(**options).choices[0].text == ""


def test_a_stream_has_the_log_probabilities_of_the_whole(served: Served) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "logprobs": 2, "echo": True, "n": 2, **GREEDY}
    whole = client(served).completions.create(**options).choices
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns: dict[tuple[int, str], list[Any]] = {(i, name): [] for i in range(2) for name in names}
    for piece in client(served).completions.create(stream=True, **options):
        (choice,) = piece.choices
        for name in names if choice.logprobs else ():
            columns[choice.index, name] += getattr(choice.logprobs, name)
    for (index, name), values in columns.items():
        assert values == getattr(whole[index].logprobs, name)


def test_chat_log_probabilities(served: Served) -> None:
    completion = client(served).chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=2, **GREEDY
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 12
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_a_seed_and_stop_texts(served: Served) -> None:
    completions = client(served).completions
    options = {**GREEDY, "temperature": 1.0, "seed": 7}
    texts = {completions.create(prompt=PROMPT, **options).choices[0].text for _ in range(3)}
    assert len(texts) == 1
    whole = eager_text(served, PROMPT, 12)
    stop = whole[4:8]
    choice = completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    pieces = list(completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_models_health_metrics_and_the_page(served: Served) -> None:
    assert [model.id for model in client(served).models.list()] == ["demo"]
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    secret = "a secret text of a user"
    post(served, "completions", {"prompt": secret, "max_tokens": 2})
    text = measured(served)
    assert "tpcompile_new_tokens_total" in text and "tpcompile_blocks_used" in text
    assert "secret" not in text
    assert "<textarea" in httpx.get(served.url).text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Served) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "temperature": 0})
    command = ["curl", "-sS", f"{served.url}/v1/completions", "-d", body]
    done = subprocess.run(
        [*command, "-H", f"Authorization: Bearer {KEY}"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer another", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_a_missing_or_wrong_key(served: Served, key: str) -> None:
    for method, path in (("POST", "v1/completions"), ("GET", "v1/models"), ("GET", "metrics")):
        answer = httpx.request(method, f"{served.url}/{path}", headers={"Authorization": key})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_of_a_key_in_any_case(served: Served, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {KEY}"}
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_a_key_that_is_not_ascii(served: Served) -> None:
    app = application(served.engine, Options("demo", "clé"))
    transport = httpx.ASGITransport(app)

    async def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}".encode()}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/v1/models", headers=headers)).status_code

    assert [asyncio.run(status(key)) for key in ("clé", "cle")] == [200, 401]


BAD: dict[str, tuple[Any, int, str]] = {
    "no json": ("{", 400, "must be JSON"),
    "no object": ([], 400, "must be a JSON object"),
    "no prompt": ({}, 400, "prompt is missing"),
    "empty": ({"prompt": ""}, 400, "at least one"),
    "empty list": ({"prompt": []}, 400, "prompt must be"),
    "mixed": ({"prompt": [1, "a"]}, 400, "prompt must be"),
    "negative": ({"prompt": [-1]}, 400, "from 0 to"),
    "outside": ({"prompt": [10**9]}, 400, "from 0 to"),
    "long": ({"prompt": [1] * 1_000_000}, 400, "at most 127 tokens"),
    "unknown": ({"prompt": "a", "tools": []}, 400, "'tools' is not supported"),
    "type": ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens must be an integer"),
    "less than none": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens must be"),
    "flag": ({"prompt": "a", "stream": 1}, 400, "stream must be true or false"),
    "range": ({"prompt": "a", "temperature": 1e9}, 400, "temperature must be"),
    "nan": ('{"prompt": "a", "temperature": NaN}', 400, "temperature must be"),
    "coldest": ({"prompt": "a", "temperature": 1e-310}, 400, "temperature must be 0 (greedy), or"),
    "cold": ({"prompt": "a", "temperature": 1e-38}, 400, "a number from 1e-05 to 100, got 1e-38"),
    "stop id": ({"prompt": "a", "stop_token_ids": [10**6], "min_tokens": 1}, 400, "must be from 0"),
    "huge id": ({"prompt": "a", "stop_token_ids": [10**30], "min_tokens": 1}, 400, "must be from"),
    "negative id": ({"prompt": "a", "stop_token_ids": [-1]}, 400, "got -1"),
    "many ids": ({"prompt": "a", "stop_token_ids": [1] * 1025}, 400, "a list of at most 1,024"),
    "many": ({"prompt": "a", "n": 5}, 400, "n must be at most 4"),
    "deep": ("[" * 100_000, 400, "must be JSON"),
    "bytes": (b"\xff\xfe", 400, "must be JSON"),
    "half of a surrogate pair": ('{"prompt": "\\ud800"}', 400, "in UTF-8"),
    "its other half in a name": ('{"\\udfff": 1}', 400, "in UTF-8"),
    "huge": (b" " * (17 << 20), 413, "at most 16,777,216 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(served: Served, name: str) -> None:
    body, status, message = BAD[name]
    answer = post(served, "completions", body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)


def test_a_bad_stop_token_names_its_field(served: Served) -> None:
    answer = post(served, "completions", {"prompt": "a", "stop_token_ids": [10**6]})
    assert answer.json()["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_request(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client gets it. Another request, which runs at the same time, gets its text."""
    choose = Sampler.choose

    def fail(sampler: Sampler, logits: torch.Tensor, tokens: list[int]) -> Chosen:
        if len(tokens) % 2:
            raise ValueError("no token")
        return choose(sampler, logits, tokens)

    init = Sampler.__init__

    def start(sampler: Sampler, params: Any, *rest: Any) -> None:
        init(sampler, params, *rest)
        if params.seed == 666:
            monkeypatch.setattr(sampler, "choose", lambda *args: fail(sampler, *args), False)

    monkeypatch.setattr(Sampler, "__init__", start)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: client(served).completions.create(prompt=PROMPT, **GREEDY))
        body = {"prompt": PROMPT, "seed": 666, "stream": stream, "ignore_eos": True, "n": 2}
        answer = post(served, "completions", body)
        assert other.result().choices[0].text == eager_text(served, PROMPT, 12)
    assert answer.status_code == (200 if stream else 500)
    assert "The request failed; others go on. Found ValueError: no token" in answer.text
    assert ("[DONE]" in answer.text) is False


def test_what_is_not_there(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/nothing").status_code == 404
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405
