"""Text to tokens: chat templates, turns and prompt lengths."""
