"""What copies compare before they exchange gradients and statistics in the order of their rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipecompile.distributed.data_parallel.exchange_order import exchange_order
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorm


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def order(self, stages: str, norms: str = "", loss: str = "") -> str:
        """Return the order of stages with these layers, a letter each, of deferred layers with a call per letter, and of a loss."""
        layers = {"1": self.first, "2": self.second}
        deferred = [DeferredNorm(layers[name]) for name in sorted({*norms})]
        for norm, name in zip(deferred, sorted({*norms}), strict=True):
            for _ in range(norms.count(name)):
                norm.new_call()
        named: list[tuple[str, torch.Tensor]] = [*self.named_parameters(), *self.named_buffers()]
        weights = [self.ids(*(layers[name] for name in stage)) for stage in stages.split()]
        return exchange_order(weights, deferred, self.ids(*(layers[name] for name in loss)), named)

    @staticmethod
    def ids(*layers: Any) -> frozenset[int]:
        return frozenset(id(weight) for layer in layers for weight in layer.parameters())


def test_copies_with_the_same_weights_have_one_order_whatever_their_ids_are() -> None:
    assert Heads().order("1 2", "12", "2") == Heads().order("1 2", "12", "2")


def test_other_weights_of_a_stage_norms_calls_and_weights_of_the_loss_are_another_order() -> None:
    """The weights have equal shapes, and the programs are equal."""
    heads = Heads()
    orders = [
        heads.order("1 2"), heads.order("2 1"), heads.order("12 2"), heads.order("1 1"), heads.order("1 2", "1"),
        heads.order("1 2", "2"), heads.order("1 2", "11"), heads.order("1 2", "", "1"),
    ]  # fmt: skip
    assert len(set(orders)) == len(orders)
