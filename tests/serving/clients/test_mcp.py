"""Tools of an MCP server: listed as OpenAI's tools, and called as the model says."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
from mcp import Client, StdioServerParameters, stdio_client

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import QUESTION, weather

ROOT = Path(__file__).parents[3]
PARAMETERS = StdioServerParameters(
    command=sys.executable, args=["-m", "tests.serving.clients.weather_server"], cwd=ROOT
)


def test_the_loop_of_a_client(server: Address) -> None:
    history, final = asyncio.run(_loop(server))
    _, call, result = history
    arguments = json.loads(call.tool_calls[0].function.arguments)
    assert result["content"] == weather(arguments["city"], arguments["days"])
    assert final.content
    assert f"tool: {result['content']}\n" in server.prompts[-1]


async def _loop(server: Address) -> tuple[list[Any], Any]:
    """Let the model call a tool; return the messages, and the answer after the result."""
    options: Any = {"model": "demo", "temperature": 0, "parallel_tool_calls": False}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    async with (
        Client(stdio_client(PARAMETERS)) as tools,
        openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client,
    ):
        options["tools"] = [
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

        async def answer(choice: Any, max_tokens: int) -> Any:
            completion = await client.chat.completions.create(
                messages=history, tool_choice=choice, max_tokens=max_tokens, **options
            )
            return completion.choices[0].message

        message = await answer("required", 120)
        history.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = await tools.call_tool(call.function.name, arguments)
            assert not result.is_error
            content = "".join(part.text for part in result.content if part.type == "text")
            history.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return history, await answer("auto", 20)
