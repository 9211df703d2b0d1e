"""A call that no kernel has a version for is refused while it is recorded, and one that runs is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import TraceError
from pipecompile.tracing.fakes.kernel_dtypes import check_dtypes

INT, FLOAT, DOUBLE, HALF = torch.int64, torch.float32, torch.float64, torch.bfloat16


class Calls(nn.Module):
    """A model that calls one function on its input and its weight, which is a matrix of 4 x 4."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(4))

    def forward(self, x):
        return self.function(x, self.weight)


def normal(x, weight):
    return F.batch_norm(x, weight[0].detach().clone(), weight[1].detach().clone(), weight[0], weight[1], training=True)


CALLS: list[tuple[str, Callable[..., torch.Tensor], torch.dtype, torch.dtype]] = [
    ("linear", lambda x, w: F.linear(x, w, w[0]), INT, FLOAT),
    ("linear without bias", F.linear, DOUBLE, FLOAT),
    ("matrix product", lambda x, w: x @ w, INT, FLOAT),
    ("matrix times vector", lambda x, w: x @ w[0], DOUBLE, FLOAT),
    ("layer norm", lambda x, w: F.layer_norm(x, (4,), w[0], w[1]), DOUBLE, FLOAT),
    ("batch norm", normal, DOUBLE, FLOAT),
    ("gelu", lambda x, w: F.gelu(x) * w, INT, FLOAT),
    ("silu", lambda x, w: F.silu(x) * w, INT, FLOAT),
    ("softmax", lambda x, w: F.softmax(x, -1) * w, INT, FLOAT),
    ("relu", lambda x, w: F.relu(x) * w, torch.bool, FLOAT),
    ("index_select", lambda x, w: w.index_select(0, x[:, 0]), FLOAT, INT),
    ("embedding", lambda x, w: F.embedding(x[:, 0], w), FLOAT, INT),
    ("classes", lambda x, w: F.cross_entropy(w[: x.shape[0]], x[:, 0]).expand(x.shape[0]), torch.int32, INT),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "refused", "accepted"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_recording_refuses_what_the_kernel_refuses(function, refused, accepted, device: str) -> None:
    bad, good = torch.ones(4, 4).to(refused), torch.ones(4, 4).to(accepted)
    model = Calls(function)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(bad)
    model(good)
    model = model.to(device)
    with pytest.raises(TraceError) as error:
        pc.trace(model, bad.to(device))
    assert error.value.code in (("PC108",) if device == "cpu" else ("PC199", "PC110"))
    words = ("dtype", "not implemented", "not supported", "indices")
    assert any(word in str(error.value) for word in words)
    pc.trace(model, good.to(device))


def test_the_command_line_and_compile_refuse_alike() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with pytest.raises(TraceError, match="PC108"):
        pc.compile(model, 2, cost="analytic", example_args=(torch.ones(12, 8, dtype=torch.int64),))


def test_autocast_and_low_precision_beside_float32_are_recorded() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pc.trace(Calls(lambda x, w: F.linear(F.gelu(x), w)), torch.ones(4, 4))
    pc.trace(Calls(lambda x, w: F.layer_norm(x, (4,), w[0], w[1])), torch.ones(4, 4, dtype=HALF))
    pc.trace(Calls(lambda x, w: F.embedding(x[:, 0], w)), torch.ones(4, 4, dtype=INT))


def test_an_operator_without_a_rule_passes() -> None:
    check_dtypes(torch.ops.aten.add.Tensor, [torch.ones(1), torch.ones(1, dtype=INT)])
    check_dtypes(print, [])
