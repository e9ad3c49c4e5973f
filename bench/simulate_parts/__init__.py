"""Parts of bench/simulate.py."""
