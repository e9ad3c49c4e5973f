"""The rollout server: turns leased prompts into scored groups, and takes new weights while it generates."""
