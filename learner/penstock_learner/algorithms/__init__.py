"""Advantages, losses, corrections and penalties as named pure functions over packed tensors.

| module | holds |
|---|---|
| `registry` | names to functions, and the path of a custom one to its function |
| `segments` | sums, means and the reverse scan over packed sequences |
| `advantages` | `ADVANTAGES`, `compute_advantages` |
| `losses` | `LOSSES`, `policy_loss` |
| `aggregation` | `AGGREGATIONS`, `aggregate`, `Denominators` |
| `corrections` | `WEIGHTS`, `REJECTIONS`, `correct`, `measure_mismatch` |
| `kl` | `PENALTIES`, `kl_penalty`, the coefficient controllers |
| `value_loss` | `value_loss` |
| `trial` | a small batch for a user's advantage and loss, before a start |
| `shaping` | DAPO's overlong penalty, rewards placed on the last token |

Tensors have no padding: the response tokens of S sequences are concatenated into flat tensors of T entries.
`sequence_ids[T]` (int64, non-decreasing, 0..S-1) is the sequence of each token, `group_ids[S]` the prompt of each
sequence. `mask[T]` is nonzero at trained tokens, and 0 at tokens that the model did not produce, such as tool output.
A value at a masked-out token never reaches a result or a gradient, whatever it is.
"""
