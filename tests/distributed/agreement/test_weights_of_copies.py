"""The weights of two copies, without processes; test_copy_calls.py has ranks that are processes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from threading import Barrier, Thread, current_thread

import torch
from torch import nn

from pipecompile.distributed.agreement.weights_of_copies import WeightsOfCopies
from pipecompile.distributed.collectives import CollectiveGroup


class Pair(CollectiveGroup):
    """A group of two copies that are threads."""

    ranks = (4, 6)

    def __init__(self) -> None:
        self.count, self._barrier, self._texts = 0, Barrier(2, timeout=10.0), ["", ""]

    def all_gather_text(self, text: str) -> list[str]:
        self.count += 1
        self._texts[int(current_thread().name)] = text
        self._barrier.wait()
        return [*self._texts]


def copies() -> tuple[list[WeightsOfCopies], list[nn.Linear]]:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    weights = [WeightsOfCopies(), WeightsOfCopies()]
    for one, layer in zip(weights, layers, strict=True):
        one.named = layer.named_parameters
    return weights, layers


def step(weights: Sequence[WeightsOfCopies], layers: Sequence[nn.Linear], group: Pair) -> list[str]:
    """Compare both copies; return what they warn of."""
    each = [[*layer.parameters()] for layer in layers]
    rows = [one.row(parameters) for one, parameters in zip(weights, each, strict=True)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [
            Thread(target=one.compare, args=(group, rows, parameters), name=str(index))
            for index, (one, parameters) in enumerate(zip(weights, each, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [str(one.message) for one in caught]


def test_a_weight_that_differs_is_told_once_with_its_name() -> None:
    (weights, layers), group = copies(), Pair()
    assert [step(weights, layers, group) for _ in range(2)] == [[], []]
    with torch.no_grad():
        layers[1].bias += 1
    warning, same = step(weights, layers, group)
    assert warning == same
    assert "the copies of the pipeline have other values of bias: rank 4: values 1; rank 6: values 2" in warning
    assert step(weights, layers, group) == []
    assert group.count == 2, "one exchange"


def test_copies_that_are_at_other_steps_are_not_compared() -> None:
    """A step that failed on one copy alone, before it was compared there."""
    (weights, layers), group = copies(), Pair()
    weights[1].row([*layers[1].parameters()])
    with torch.no_grad():
        layers[1].bias += 1
    assert step(weights, layers, group) == []
    assert group.count == 0


def test_a_buffer_that_differs_is_told_unless_one_copy_alone_knows_it() -> None:
    """A mask that one copy had changed was read by it alone, without a word, before."""
    (weights, layers), group = copies(), Pair()
    for one, layer, scale in zip(weights, layers, (1.0, 2.0), strict=True):
        layer.register_buffer("scale", torch.tensor([scale]))
        one.named = lambda layer=layer: [*layer.named_parameters(), *layer.named_buffers()]
    weights[1].buffers = lambda: [*layers[1].buffers()]
    assert step(weights, layers, group) == [], "the other copy may write it"
    weights[0].buffers = lambda: [*layers[0].buffers()]
    warning, same = step(weights, layers, group)
    assert warning == same
    assert "the copies of the pipeline have other values of scale: rank 4: values 1; rank 6: values 2" in warning
