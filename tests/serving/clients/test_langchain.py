"""LangChain's ChatOpenAI: messages, streams, tools and forms of answers."""

from __future__ import annotations

import asyncio
import functools
import operator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import (
    ANSWERS,
    QUESTION,
    Forecast,
    Place,
    Weather,
    get_weather,
    weather,
)

MESSAGES: Any = [SystemMessage("Be brief."), HumanMessage(QUESTION)]

ONE: Any = {"strict": True, "parallel_tool_calls": False}
"""One call, without other arguments than those of the class."""


@pytest.fixture
def model(server: Address) -> ChatOpenAI:
    return _model(server, 30)


def _model(server: Address, max_tokens: int) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo",
        base_url=server.url,
        api_key=server.key,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
    )


@pytest.fixture(scope="module")
def weather_of() -> BaseTool:
    weather_tool: BaseTool = tool("weather", args_schema=Weather)(weather)
    return weather_tool


def test_whole_answers_streams_and_batches(model: ChatOpenAI) -> None:
    answer = model.invoke(MESSAGES)
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 30
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(model.stream(MESSAGES))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert len(chunks) > 5
    batch = model.batch([MESSAGES, QUESTION, MESSAGES])
    assert batch[0].content == batch[2].content == answer.content


def test_async_answers(model: ChatOpenAI) -> None:
    async def answers() -> tuple[Any, list[Any]]:
        whole, chunks = await asyncio.gather(model.ainvoke(MESSAGES), _collected(model))
        await model.root_async_client.close()
        return whole.content, chunks

    whole, chunks = asyncio.run(answers())
    assert "".join(chunks) == whole == model.invoke(MESSAGES).content


async def _collected(model: ChatOpenAI) -> list[Any]:
    return [chunk.content async for chunk in model.astream(MESSAGES)]


def test_a_loop_with_a_tool(server: Address, weather_of: BaseTool) -> None:
    model = _model(server, 120)
    caller = model.bind_tools([weather_of], tool_choice="required", **ONE)
    message = caller.invoke(MESSAGES)
    (call,) = message.tool_calls
    assert call["name"] == "weather" and Weather(**call["args"])
    assert not message.invalid_tool_calls
    result = weather_of.invoke(call)
    assert result.content == weather(**call["args"])
    final = _model(server, 20).bind_tools([weather_of], tool_choice="none")
    assert final.invoke([*MESSAGES, message, result]).content
    assert f"tool: {result.content}\n" in server.prompts[-1]


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_model_decides_to_call(trained: Address, question: str, streamed: bool) -> None:
    weather_in = tool("get_weather", args_schema=Place)(get_weather)
    caller = _model(trained, 60).bind_tools([weather_in])

    def answer() -> Any:
        if not streamed:
            return caller.invoke(messages)
        return functools.reduce(operator.add, caller.stream(messages))

    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(question)]
    message = answer()
    (call,) = message.tool_calls
    assert call["name"] == "get_weather" and not message.content
    messages += [message, weather_in.invoke(call)]
    message = answer()
    assert message.content == ANSWERS[question] and not message.tool_calls


def test_a_stream_of_a_call(server: Address, weather_of: BaseTool) -> None:
    model = _model(server, 120)
    caller = model.bind_tools([weather_of], tool_choice="weather", **ONE)
    message = AIMessageChunk("")
    pieces = 0
    for chunk in caller.stream(MESSAGES):
        message += chunk
        pieces += len(chunk.tool_call_chunks)
    (call,) = message.tool_calls
    (whole,) = caller.invoke(MESSAGES).tool_calls
    assert (call["name"], call["args"]) == (whole["name"], whole["args"])
    assert call["id"] and pieces > 5


# The client serializes OpenAI's answer after it has set `parsed`, which has no type there.
@pytest.mark.filterwarnings("ignore:(?s)Pydantic serializer.*field_name='parsed':UserWarning")
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(server: Address, method: Any) -> None:
    model = _model(server, 160)
    if method == "json_mode":  # any object, so only some fit the class
        answer = model.with_structured_output(method=method).invoke(MESSAGES)
        assert isinstance(answer, dict)
        return
    shaped = model.with_structured_output(Forecast, method=method)
    forecast = shaped.invoke(MESSAGES)
    assert isinstance(forecast, Forecast)
    assert list(shaped.stream(MESSAGES))[-1] == forecast
