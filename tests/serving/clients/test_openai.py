"""OpenAI's client: whole answers, streams, forms of answers, and a loop with a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ParsedFunctionToolCall

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

USER: Any = [{"role": "user", "content": QUESTION}]
ASK: Any = {"model": "demo", "messages": USER, "max_tokens": 40, "temperature": 0}
CALL: Any = ASK | {
    "tools": [openai.pydantic_function_tool(Weather, name="weather")],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 120,
}

PLACE_TOOL = openai.pydantic_function_tool(Place, name="get_weather")


@pytest.fixture
def client(server: Address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client


def test_streams_join_to_the_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    chunks = list(
        client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    assert _joined(chunks) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason == "length"
    assert chunks[-1].usage and answer.usage
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 40
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 40


def test_async_clients_at_once(server: Address, client: openai.OpenAI) -> None:
    async def answers() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key) as other:

            async def streamed() -> str:
                chunks = await other.chat.completions.create(**ASK, stream=True)
                return _joined([chunk async for chunk in chunks])

            async def whole() -> str | None:
                return (await other.chat.completions.create(**ASK)).choices[0].message.content

            return await asyncio.gather(whole(), streamed(), whole(), streamed())

    alone = client.chat.completions.create(**ASK).choices[0].message.content
    assert asyncio.run(answers()) == [alone] * 4


def _joined(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("name", ["chat", "beta.chat"])
def test_parsed_answers(client: openai.OpenAI, name: str) -> None:
    chat = client.chat if name == "chat" else client.beta.chat
    message = chat.completions.parse(**ASK | {"max_tokens": 120}, response_format=Forecast)
    forecast = message.choices[0].message.parsed
    assert isinstance(forecast, Forecast) and 1 <= len(forecast.degrees) <= 3


def test_a_stream_of_a_parsed_answer(client: openai.OpenAI) -> None:
    snapshots = []
    body = ASK | {"max_tokens": 120}
    with client.chat.completions.stream(**body, response_format=Forecast) as stream:
        for event in stream:
            if event.type == "content.delta":
                snapshots.append(event.snapshot)
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Forecast)
    assert final.content == snapshots[-1] and len(snapshots) > 5
    whole = client.chat.completions.parse(**body, response_format=Forecast)
    assert whole.choices[0].message.parsed == final.parsed


def test_a_loop_with_a_tool(server: Address, client: openai.OpenAI) -> None:
    message = client.chat.completions.parse(**CALL).choices[0].message
    (call,) = message.tool_calls or ()
    assert isinstance(call, ParsedFunctionToolCall)
    arguments = call.function.parsed_arguments
    assert isinstance(arguments, Weather) and message.content is None
    result = weather(arguments.city, arguments.days)
    history = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    options = CALL | {"messages": history, "tool_choice": "auto", "max_tokens": 20}
    final = client.chat.completions.create(**options)
    assert final.choices[0].message.content
    prompt = server.prompts[-1]
    assert f"tool: {result}\n" in prompt
    assert f'weather {{"city": "{arguments.city}", "days": {arguments.days}}}' in prompt


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_model_decides_to_call(trained: Address, question: str, streamed: bool) -> None:
    history: Any = [{"role": "user", "content": question}]
    options: Any = {"model": "demo", "temperature": 0, "tools": [PLACE_TOOL]}
    with openai.OpenAI(base_url=trained.url, api_key=trained.key, max_retries=0) as client:

        def answer() -> Any:
            if not streamed:
                return client.chat.completions.create(messages=history, **options).choices[0]
            with client.chat.completions.stream(messages=history, **options) as stream:
                return stream.get_final_completion().choices[0]

        choice = answer()
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert call.function.name == "get_weather"
        result = get_weather(**json.loads(call.function.arguments))
        history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        choice = answer()
        assert choice.message.content == ANSWERS[question]
        assert choice.finish_reason == "stop" and not choice.message.tool_calls
        history = [{"role": "user", "content": "Hello!"}]
        assert answer().message.content == "Hello! How can I help you?"


def test_a_stream_of_a_call(client: openai.OpenAI) -> None:
    arguments, done = "", []
    with client.chat.completions.stream(**CALL) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event)
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and call.id
    assert [(event.name, event.arguments) for event in done] == [("weather", arguments)]
    assert Weather.model_validate_json(arguments) == call.function.parsed_arguments
    (whole,) = client.chat.completions.create(**CALL).choices[0].message.tool_calls or ()
    assert whole.type == "function" and whole.function.arguments == arguments


def test_thinking_before_a_parsed_answer(client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8}
    answer = client.chat.completions.parse(
        **ASK | {"max_tokens": 160}, response_format=Forecast, extra_body=extra
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Forecast)
    assert message.model_extra and message.model_extra["reasoning_content"]
    details = answer.usage and answer.usage.completion_tokens_details
    assert details and details.reasoning_tokens


def test_texts_and_models(client: openai.OpenAI) -> None:
    text = client.completions.create(model="demo", prompt="Anna is", max_tokens=9, temperature=0)
    chunks = client.completions.create(
        model="demo", prompt="Anna is", max_tokens=9, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"


def test_errors_have_their_classes(server: Address, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(**ASK | {"model": "gpt-4o"})
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(**ASK | {"temperature": -1})
    assert refused.value.param is None or refused.value.param == "temperature"
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
