from __future__ import annotations

import torch

from pipecompile.distributed.data_parallel.weighed_gradients import weigh_in_place, weighed


def test_gradients_of_a_loss_that_counts_nothing_are_zeros() -> None:
    """They are 0/0, and times 0 that is not a number."""
    gradients = torch.tensor([torch.nan, 2.0])
    assert weighed(None, 0.5) is None
    half = weighed(gradients, 0.5)
    assert half is not None
    assert half[1] == 1.0
    weigh_in_place(gradients, 0.0)
    assert gradients.tolist() == [0.0, 0.0]
