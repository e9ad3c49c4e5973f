"""Attention over packed sequences and over prefix trees: layouts, kernels, and the split of heads over ranks."""
