from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc


def test_a_script_for_ranks_runs_in_one_process() -> None:
    """Started by torchrun on one rank alone, it had no full_state_dict and no gathered."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, loss_fn=mse_loss, cost="analytic", batch_norm="each")
    assert pipe.gathered() is None
    x = torch.randn(4, 3)
    assert pipe.needs_inputs
    assert pipe.needs_targets
    pipe.step(x, target=x)
    assert pipe.sum_over_copies({"right": 3}) == {"right": 3}
    assert pipe.gathered() == pipe.measured
    before = pipe.full_state_dict()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    pipe.step(x, target=x)
    assert before.keys() == expected.keys()
    assert all(torch.equal(before[key], value) and not value.requires_grad for key, value in expected.items())
