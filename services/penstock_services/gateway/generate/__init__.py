"""Generation for OpenAI clients, and recorded sessions."""
