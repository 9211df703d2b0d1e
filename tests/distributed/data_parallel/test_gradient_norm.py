from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.data_parallel.gradient_norm import scale_to_norm, spread_infinities, total_norm


class TwoRanks(CollectiveGroup):
    """A group whose other rank has `other`, or the same values as this rank if that is None."""

    def __init__(self, other: torch.Tensor | None = None) -> None:
        self.other = other

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (tensor if self.other is None else self.other)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.other is None else torch.maximum(tensor, self.other)


def parameters_with_gradients(*values: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full((2,), value)
    return parameters


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, torch.inf])
def test_the_norm_is_that_of_the_gradients_of_both_ranks(norm_type: float) -> None:
    gradients = [torch.randn(3), torch.randn(2, 2)]
    expected = torch.nn.utils.get_total_norm([*gradients, *gradients], norm_type)
    torch.testing.assert_close(total_norm(gradients, norm_type, TwoRanks()), expected.double())


def test_a_rank_without_gradients_has_norm_zero() -> None:
    assert total_norm([], 2.0, TwoRanks(torch.tensor(9.0))).item() == 3.0
    assert total_norm([], torch.inf, TwoRanks(torch.tensor(9.0))).item() == 9.0


def test_sharded_gradients_are_counted_once(single_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    gradients = [DTensor.from_local(torch.full((4,), 2.0), mesh, [Shard(0)]), torch.full((1,), 3.0)]
    assert total_norm(gradients, 2.0, TwoRanks(torch.tensor(0.0))).item() == pytest.approx(5.0)


def test_an_empty_part_has_infinity_norm_zero(single_rank: None) -> None:
    """A matrix of fewer rows than copies has no row on some ranks, which raised an error."""
    mesh = init_device_mesh("cpu", (1,))
    layout = {"run_check": False, "shape": torch.Size([1, 3]), "stride": (3, 1)}
    empty = DTensor.from_local(torch.zeros(0, 3), mesh, [Shard(0)], **layout)
    for gradients in ([empty], [empty, torch.zeros(0), torch.tensor([-2.0])]):
        expected = 2.0 * (len(gradients) > 1)
        assert total_norm(gradients, torch.inf, TwoRanks(torch.tensor(0.0))).item() == expected
        assert total_norm(gradients, 2.0, TwoRanks(torch.tensor(0.0))).item() == expected


def test_gradients_are_scaled_down_but_never_up() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)]
    scale_to_norm(gradients, torch.tensor(5.0, dtype=torch.float64), 1.0)
    assert [gradient.item() for gradient in gradients] == pytest.approx([0.6, 0.8])
    scale_to_norm(gradients, torch.tensor(1.0, dtype=torch.float64), 10.0)
    assert [gradient.item() for gradient in gradients] == pytest.approx([0.6, 0.8])
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float64]


@pytest.mark.parametrize(("own", "other", "is_spread"), [(1.0, 0.0, False), (torch.nan, 0.0, True), (1.0, 1.0, True)])
def test_an_infinity_of_one_rank_is_spread_to_all_gradients(own: float, other: float, *, is_spread: bool) -> None:
    parameters = [*parameters_with_gradients(own, 2.0), nn.Parameter(torch.zeros(1))]
    spread_infinities(parameters, [TwoRanks(torch.tensor(other))], torch.amp.GradScaler("cpu"))
    gradients = [cast(Any, parameter.grad) for parameter in parameters]
    assert gradients[2] is None
    assert gradients[1].tolist() == ([torch.inf] * 2 if is_spread else [2.0] * 2)


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_a_rank_without_gradients_scales_as_the_others_do(other: float) -> None:
    """A rank whose stage is frozen has none: its scaler raised AssertionError, or kept a scale that others had halved."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD([{"params": []}], lr=1.0)
    scaler.scale(torch.ones(1))
    spread_infinities([], [TwoRanks(torch.tensor(other))], scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if other else 8.0)
