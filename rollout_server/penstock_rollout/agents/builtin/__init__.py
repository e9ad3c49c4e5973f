"""The built-in tools, which `rollout.agents.tools` offers by name."""
