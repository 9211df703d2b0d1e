from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private.tensor_bytes import footprint

DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (DENSE, 16),
        (DENSE.to_sparse(), 2 * 4 + 2 * 2 * 8),
        (DENSE.to_sparse_csr(), 2 * 4 + 3 * 8 + 2 * 8),
        (DENSE.to_sparse_csc(), 2 * 4 + 3 * 8 + 2 * 8),
        (torch.ones(4, device="meta"), 16),
    ],
)
def test_bytes_of_what_is_stored(tensor: torch.Tensor, expected: int) -> None:
    assert footprint(tensor) == expected
