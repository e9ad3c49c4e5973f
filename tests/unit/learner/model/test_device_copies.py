"""Small tensors that are copied to the host together arrive as they were."""

from __future__ import annotations

import torch

from penstock_learner.model.attention.packed_layout import to_host


def test_tensors_of_several_types_and_shapes_are_copied_exactly() -> None:
    tensors = [
        torch.tensor(2**40 + 1),
        torch.tensor(0.1, dtype=torch.float32),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.tensor([float("nan"), float("-inf")]),
        torch.zeros(0),
        torch.tensor([True, False]),
        torch.tensor(1 / 3, dtype=torch.bfloat16),
    ]
    copies = to_host(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.shape == tensor.shape
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0, equal_nan=True)
