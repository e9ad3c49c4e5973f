"""Answers for clients outside of training: tool calls, constrained output, OpenAI's and Anthropic's protocols."""
