"""Agent loops: how a prompt becomes a trajectory. See docs/agents.md."""
