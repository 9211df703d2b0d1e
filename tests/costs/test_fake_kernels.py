"""Operators that the CPU refuses or that compare values run on fake tensors all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.costs import analytic_costs
from pipecompile.costs.fake_kernels import FakeKernels
from pipecompile.torch_private.modes import FakeTensorMode


class Counted(nn.Module):
    """Chooses by the device, as mixtures of experts do: the CPU counts floats alone, a GPU integers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        numbers = ids.float() if ids.device.type == "cpu" else ids.int()
        counts = torch.histc(numbers, bins=8, min=0, max=7)
        return self.rows(ids) * counts[:4]


def test_a_model_on_meta_may_do_what_only_a_gpu_can(caplog):
    with torch.device("meta"):
        model, ids = Counted(), torch.zeros(4, dtype=torch.long)
    graph = pc.trace(model, ids)
    costs = analytic_costs(graph, [ids], device="h100")
    assert costs["histc"].forward > 0
    assert costs["mul"].output_bytes == 4 * 4 * 4
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_results_have_the_device_that_the_cpu_stands_for():
    with FakeTensorMode(), FakeKernels(torch.device("cpu")):
        counts = torch.histc(torch.empty(4, dtype=torch.int32), bins=8, min=0, max=7)
    assert (counts.device.type, counts.dtype, counts.shape) == ("cpu", torch.int32, (8,))


def test_other_errors_are_raised():
    with FakeTensorMode(), FakeKernels(torch.device("cpu")), pytest.raises(RuntimeError, match="length 3"):
        torch.empty(4) + torch.empty(3)
