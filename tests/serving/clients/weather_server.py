"""An MCP server with one tool, which talks over stdin and stdout."""

from __future__ import annotations

from mcp.server import MCPServer

from tests.serving.clients.weather import get_weather

if __name__ == "__main__":
    server = MCPServer("weather")
    server.tool()(get_weather)
    server.run()
