"""The jobs of loading.py and gpu/loading.py, and the program of a rank."""
