"""LiteLLM: whole answers, streams and tools, with and without asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import QUESTION, Forecast, Weather, weather, weather_tool

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CALL: dict[str, Any] = {
    "tools": [weather_tool()],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 120,
}


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Import LiteLLM, which would download prices of models if this variable did not forbid it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        yield litellm


@pytest.fixture
def options(server: Address) -> dict[str, Any]:
    return {
        "model": "openai/demo",
        "api_base": server.url,
        "api_key": server.key,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 30,
        "num_retries": 0,
    }


def test_streams_join_to_the_whole_answer(litellm: Any, options: Any) -> None:
    answer = litellm.completion(**options)
    content = answer.choices[0].message.content
    assert answer.usage.completion_tokens == 30 and content
    chunks = list(litellm.completion(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content

    async def asynchronous() -> tuple[str, str]:
        whole = await litellm.acompletion(**options)
        stream = await litellm.acompletion(**options, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await litellm.close_litellm_async_clients()
        return whole.choices[0].message.content, "".join(texts)

    assert asyncio.run(asynchronous()) == (content, content)


def test_a_loop_with_a_tool(litellm: Any, server: Address, options: Any) -> None:
    message = litellm.completion(**options | CALL).choices[0].message
    (call,) = message.tool_calls
    arguments = Weather.model_validate_json(call.function.arguments)
    result = weather(arguments.city, arguments.days)
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    more = CALL | {"messages": history, "tool_choice": "auto", "max_tokens": 20}
    assert litellm.completion(**options | more).choices[0].message.content
    assert f"tool: {result}\n" in server.prompts[-1]


def test_a_stream_of_a_call(litellm: Any, options: Any) -> None:
    chunks = list(litellm.completion(**options | CALL, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    (call,) = rebuilt.choices[0].message.tool_calls
    (whole,) = litellm.completion(**options | CALL).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", whole.function.arguments)
    assert rebuilt.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("form", [Forecast, {"type": "json_object"}], ids=["class", "json_object"])
def test_structured_output(litellm: Any, options: Any, form: Any) -> None:
    answer = litellm.completion(**options | {"max_tokens": 160}, response_format=form)
    read: Callable[[str], Any] = (
        json.loads if isinstance(form, dict) else Forecast.model_validate_json
    )
    assert read(answer.choices[0].message.content)


def test_errors_have_their_classes(litellm: Any, options: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options | {"temperature": -1})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**options | {"api_key": "wrong"})
