"""The jobs of loading.py and gpu/loading_gpu.py, and the program of a rank."""
