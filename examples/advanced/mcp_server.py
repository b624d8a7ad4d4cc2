"""A server of one tool, which mcp_client.py starts; it speaks MCP over standard in and output."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("library")


@server.tool()
def opening_hours(day: str) -> str:
    """Find out when the library is open on a day of the week."""
    return f"closed on {day}" if day == "Sunday" else f"open from 9 to 18 on {day}"


if __name__ == "__main__":
    server.run("stdio")
