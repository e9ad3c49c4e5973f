"""The engines that generate tokens, behind one protocol (engine.py)."""
