"""An MCP server with one tool, which talks over stdin and stdout."""

from __future__ import annotations

from mcp.server import MCPServer

from tests.serving.clients.weather import weather

if __name__ == "__main__":
    server = MCPServer("weather")
    server.tool()(weather)
    server.run()
