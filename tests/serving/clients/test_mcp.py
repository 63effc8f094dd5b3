"""Tools of an MCP server: listed as OpenAI's tools, and called as the model decides."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import ANSWERS

ROOT = Path(__file__).parents[3]
PARAMETERS = StdioServerParameters(
    command=sys.executable, args=["-m", "tests.serving.clients.weather_server"], cwd=ROOT
)


@pytest.mark.parametrize("question", ANSWERS)
def test_the_loop_of_a_client(trained: Address, question: str) -> None:
    history = asyncio.run(_loop(trained, question))
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "assistant"]
    assert history[-1]["content"] == ANSWERS[question]


async def _loop(server: Address, question: str) -> list[Any]:
    """Let the model call tools until it answers; return the messages."""
    history: list[Any] = [{"role": "user", "content": question}]
    async with (
        Client(stdio_client(PARAMETERS)) as tools,
        openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client,
    ):
        listed: Any = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in (await tools.list_tools()).tools
        ]
        while history[-1]["role"] != "assistant":
            completion = await client.chat.completions.create(
                model="demo", messages=history, tools=listed, temperature=0
            )
            message = completion.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                result = await tools.call_tool(call.function.name, arguments)  # type: ignore[union-attr]
                assert not result.is_error
                content = "".join(part.text for part in result.content if part.type == "text")
                history.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return history
