"""Agent loops turn a prompt into a trajectory. See docs/agents.md."""
