"""The rollout server: turns leased prompts into scored groups, and receives new weights while it generates."""
