"""Operators as the dispatcher knows them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.torch_private.operators import (
    HigherOrderOperator,
    name_of,
    schema_of,
    symbolic_function,
    torch_assert,
    written_arguments,
    written_tensors,
)
from tests.support.eager import accumulate, assert_same

pytestmark = pytest.mark.smoke


def test_a_schema_says_what_is_written() -> None:
    assert schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert not schema_of(torch.ops.aten.add.Tensor).is_mutable


def test_higher_order_operators_have_a_name() -> None:
    operator = torch.ops.higher_order.cond
    assert isinstance(operator, HigherOrderOperator)
    assert name_of(operator) == "cond"


def test_functions_of_sizes() -> None:
    root = symbolic_function("sqrt")
    assert root is not None
    assert root(4) == 2
    assert symbolic_function("nonsense") is None


def test_torch_assert_raises() -> None:
    torch_assert(True, "fine")
    with pytest.raises(AssertionError, match="three"):
        torch_assert(False, "three")


LIBRARY = torch.library.Library("pipecompile_state", "DEF")
LIBRARY.define("update(Tensor(a!) state, Tensor x) -> Tensor")
LIBRARY.impl("update", lambda state, x: x - state.mul_(0.9).add_(x.mean(0)), "CompositeExplicitAutograd")


def test_operators_of_libraries_and_observers_say_what_they_write() -> None:
    update = torch.ops.pipecompile_state.update
    assert written_arguments(update) == written_arguments(update.default) == ((0, "state"),)
    observed = ((3, "running_min"), (4, "running_max"), (5, "scale"), (6, "zero_point"))
    assert written_arguments(torch.fused_moving_avg_obs_fake_quant) == observed
    for pure in (torch.add, torch.ops.aten.add, torch.ops.aten.add.Tensor, len, nn.functional.relu):
        assert written_arguments(pure) == ()


class Updated(nn.Module):
    """State that an operator of a library writes, and that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), nn.Buffer(torch.zeros(4))

    def forward(self, x):
        x = self.layer(x)
        return x + 0 * torch.ops.pipecompile_state.update(self.state, x.detach()).sum() - self.state


class Observed(nn.Module):
    """A quantized weight and output, as in training with `torch.ao.quantization`: the first forward gives buffers their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.low, self.high = nn.Buffer(torch.empty(0)), nn.Buffer(torch.empty(0))
        self.scale, self.zero = nn.Buffer(torch.ones(1)), nn.Buffer(torch.zeros(1, dtype=torch.int32))
        self.on = nn.Buffer(torch.ones(1, dtype=torch.long))

    def forward(self, x):
        state = self.on, self.on, self.low, self.high, self.scale, self.zero
        weight = torch.fused_moving_avg_obs_fake_quant(self.layer.weight, *state, 0.1, -128, 127, 0, True, True)
        return nn.functional.linear(x, weight, self.layer.bias)


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", [Updated, Observed])
def test_state_that_operators_write_is_that_of_the_loop(make: type[nn.Module], checkpoint: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh(), make())
    eager = copy.deepcopy(model)
    options = {"n_microbatches": 3, "cost": "analytic", "checkpoint": checkpoint}
    pipe = pc.compile(model, 2, loss_fn=nn.functional.mse_loss, **options)
    for _ in range(2):
        x, target = torch.randn(6, 4), torch.randn(6, 4)
        pipe.step(x, target=target)
        accumulate(eager, x, 3, nn.functional.mse_loss, target)
        assert_same(model, eager, 1e-6)


def test_written_tensors_are_those_of_the_schema_lists_included() -> None:
    one, two = torch.ones(1), torch.ones(1)
    assert [*map(id, written_tensors(torch.ops.aten.add_.Tensor, (one, two), {}))] == [id(one)]
    assert [*map(id, written_tensors(torch.ops.aten.add.out, (one, one), {"out": two}))] == [id(two)]
    assert [*map(id, written_tensors(torch.ops.aten._foreach_mul_.Scalar, ([one, two], 2), {}))] == [id(one), id(two)]
    assert written_tensors(torch.ops.higher_order.cond, (one,), {}) == []
