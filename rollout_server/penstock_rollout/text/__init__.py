"""Converts text to tokens and back: chat templates, turns, prompt lengths, streamed text."""
