"""The servers of durable.py, which are killed, and what saving tokens costs while nothing fails."""
