"""Tools of MCP servers, which `rollout.agents.mcp_servers` names."""
