"""Notes on a call: the tensors of the model that it may write."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.opaque.trial_calls import TrialCall


def test_buffers_may_be_written_and_parameters_where_they_were() -> None:
    weight, trained, buffer = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), torch.ones(1)
    call = TrialCall(pytree.tree_structure(None), [], used=(weight, buffer), trained=(trained,))
    assert [id(tensor) for tensor in call.state] == [id(buffer), id(trained)]
