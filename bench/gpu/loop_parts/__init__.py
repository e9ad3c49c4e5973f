"""The whole run of loop.py, as processes of their own."""
