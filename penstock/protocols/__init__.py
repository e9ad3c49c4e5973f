"""The protocols that clients speak (OpenAI, Anthropic), translated to generate calls and back.

`conversation.py` is the one form that every protocol is translated to. Nothing here knows an engine, a tokenizer or a
server: the gateway and the rollout servers both use it.
"""
