"""Advantages, losses, corrections and penalties as named pure functions over packed tensors.

Tensors have no padding: the response tokens of S sequences are concatenated into flat tensors of T entries.
`sequence_ids[T]` (int64, non-decreasing, 0..S-1) is the sequence of each token, `group_ids[S]` the prompt of each
sequence. `mask[T]` is nonzero at trained tokens, and 0 at tokens that the model did not produce, such as tool output.
A value at a masked-out token never reaches a result or a gradient, whatever it is.
"""

RATIO_EDGES = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0, 1.01, 1.05, 1.1, 1.25, 2.0, 4.0, 10.0)
"""Upper edges (inclusive) of the buckets in which ratios are counted. They are here because metrics, which have the
same buckets, are declared without torch."""
