"""Agents of pydantic-ai: tools, and types of output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunContext
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import ANSWERS, QUESTION, Forecast, get_weather, weather

SETTINGS: Any = {"temperature": 0, "max_tokens": 160, "parallel_tool_calls": False}


@pytest.fixture
def model(server: Address) -> OpenAIChatModel:
    return _model(server)


def _model(server: Address) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=server.url, api_key=server.key)
    return OpenAIChatModel("demo", provider=provider)


def _tool_first(context: RunContext[None]) -> Any:
    """Let the first answer call the tool, and the next one give the output."""
    return SETTINGS | {"tool_choice": ["weather"] if context.run_step == 1 else "none"}


def _check(result: Any, server: Address) -> None:
    """Check the output, and that the tool is called once before it."""
    assert isinstance(result.output, Forecast)
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [
        part for part in parts if isinstance(part, ToolCallPart) and part.tool_name == "weather"
    ]
    (call,) = calls
    returned = next(part for part in parts if isinstance(part, ToolReturnPart))
    assert returned.content == weather(**call.args_as_dict())
    assert f"tool: {returned.content}\n" in server.prompts[-1]
    assert result.usage.requests == len(server.prompts) == 2 and result.usage.output_tokens


@pytest.mark.parametrize("output", [Forecast, NativeOutput(Forecast)], ids=["tool", "schema"])
def test_an_agent_with_a_tool(server: Address, model: OpenAIChatModel, output: Any) -> None:
    async def result() -> Any:
        async with _agent(model, output) as agent:
            return await agent.run(QUESTION)

    _check(asyncio.run(result()), server)


@pytest.mark.parametrize("output", [Forecast, NativeOutput(Forecast)], ids=["tool", "schema"])
def test_a_stream_of_an_agent(server: Address, model: OpenAIChatModel, output: Any) -> None:
    async def streamed() -> list[Any]:
        async with (
            _agent(model, output) as agent,
            agent.run_stream(QUESTION) as result,
        ):
            outputs = [part async for part in result.stream_output()]
            assert outputs[-1] == await result.get_output()
            return outputs

    assert isinstance(asyncio.run(streamed())[-1], Forecast)
    assert len(server.prompts) == 2


def _agent(model: OpenAIChatModel, output: Any) -> Agent[None, Any]:
    return Agent(model, output_type=output, tools=[weather], model_settings=_tool_first, retries=0)


@pytest.mark.parametrize("question", ANSWERS)
def test_the_model_decides_to_call(trained: Address, question: str) -> None:
    async def outputs() -> tuple[Any, str]:
        settings: Any = {"temperature": 0}
        async with Agent(
            _model(trained), tools=[get_weather], model_settings=settings, retries=0
        ) as agent:
            async with agent.run_stream(question) as stream:
                streamed = await stream.get_output()
            return await agent.run(question), streamed

    whole, streamed = asyncio.run(outputs())
    assert whole.output == streamed == ANSWERS[question]
    assert whole.usage.requests == 2 and whole.usage.tool_calls == 1


def test_texts_and_errors(model: OpenAIChatModel) -> None:
    async def texts() -> tuple[str, str]:
        async with Agent(model, model_settings=SETTINGS | {"max_tokens": 20}, retries=0) as agent:
            whole = await agent.run(QUESTION)
            async with agent.run_stream(QUESTION) as result:
                streamed = await result.get_output()
            with pytest.raises(ModelHTTPError, match="temperature"):
                await agent.run(QUESTION, model_settings={"temperature": -1})
            return whole.output, streamed

    whole, streamed = asyncio.run(texts())
    assert whole and whole == streamed
