"""Tools that run here: callbacks, MCP servers, the loop of calls and answers, sessions, agents."""
