"""Facts of a whole recording."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.tracing import trace


def test_the_facts_of_a_small_recording() -> None:
    noted = trace(nn.Linear(4, 2), torch.randn(3, 4)).facts
    assert (noted.names, noted.dims, noted.device.type) == (("input",), (0,), "cpu")
    assert (noted.batch_size, noted.guards, noted.kept, noted.grad_mode, noted.ties) == (None, (), (), None, None)
    assert (noted.in_spec.num_leaves, noted.out_spec.num_leaves) == (1, 1)
    assert noted.outside.grad
