from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.runtime.cells.batch_moments import Observations, merge_all


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Counts what is launched on a GPU: views launch nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def observed(n_layers: int, n_parts: int, *, is_averaged: bool) -> list[Observations]:
    torch.manual_seed(0)
    layers = [Observations(is_averaged) for _ in range(n_layers)]
    for part in range(n_parts):
        for number, layer in enumerate(layers):
            if part or number:  # layer 0 sees one micro-batch less
                count = 6.0 + part
                layer.parts.append((count, torch.randn(3 + number), torch.rand(3 + number)))
    return layers


def one_by_one(layer: Observations) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Merged as eagerly as it is written in the paper."""
    total, mean, spread = 0.0, torch.zeros(()).double(), torch.zeros(()).double()
    for count, new, variance in layer.parts:
        if layer.is_averaged:
            before, now = total / (total + count), count / (total + count)
            mean, spread = mean * before + new.double() * now, spread * before + variance.double() * now
        else:
            difference = new.double() - mean
            within, weight = variance.double() * (count - 1), total * count / (total + count)
            spread = spread + (within + difference.square() * weight)
            mean = mean + difference * (count / (total + count))
        total += count
    return total, mean, spread


def test_all_layers_together_are_merged_as_each_by_itself() -> None:
    for is_averaged in (False, True):
        layers = observed(3, 4, is_averaged=is_averaged)
        expected = [one_by_one(layer) for layer in layers]
        merge_all(layers)
        for layer, (count, mean, spread) in zip(layers, expected, strict=True):
            assert layer.moments is not None
            assert layer.moments.count == count
            assert torch.equal(layer.moments.mean, mean)
            assert torch.equal(layer.moments.spread, spread)


def test_what_a_merge_launches_does_not_grow_with_the_layers() -> None:
    """Before, about 15 kernels per layer and micro-batch."""
    counts = []
    for n_layers in (2, 40):
        layers = observed(n_layers, 4, is_averaged=False)
        with Launches() as launches:
            merge_all(layers)
        counts.append(launches.count)
    assert counts[0] == counts[1] <= 4 * 12 + 12


def test_nothing_observed_has_no_moments() -> None:
    assert Observations(is_averaged=False).merged() is None
