"""What copies compare before they exchange gradients and statistics in the order of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.data_parallel.gradient_exchange import completed, exchange_order
from pipecompile.ir import Action, Instruction, Kind, Op, Operand, Value
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


V = (Operand(Value("v", 0)),)
FIRST, SECOND, THIRD, LAST = (frozenset({stage}) for stage in range(4))


def row(text: str) -> list[Instruction]:
    return [instruction(word) for word in text.split()]


def instruction(word: str) -> Instruction:
    match word:
        case "send":
            return Instruction(Op.SEND, reads=V, peer=1)
        case "recv":
            return Instruction(Op.RECV, writes=V, peer=1)
        case "free":
            return Instruction(Op.FREE, reads=V)
        case _:
            return Instruction(Op.COMPUTE, action=Action.parse(word))


def places(text: str, weights: list[frozenset[int]]) -> dict[int, set[int]]:
    """Return the weights that are complete, by the index of a word."""
    return {index: set(ids) for index, ids in completed(row(text), weights).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 2F0 2B0 0B0", {2: {2}, 3: {0}}),
        ("0F0 2F0 2I0 0I0 2W0 0W0", {4: {2}, 5: {0}}),
        ("0F0 2F0 2W0 2I0 0W0 0I0", {3: {2}, 5: {0}}),  # the last I may come after the last W
        ("2B0 2B1 0B0 0B1", {1: {2}, 3: {0}}),
        ("0F0 2F0", {}),
        ("0F0 2R0 2B0 0R0 0B0", {2: {2}, 4: {0}}),
    ],
)
def test_a_weight_is_complete_after_the_last_action_that_adds_to_it(text: str, expected: dict[int, set[int]]) -> None:
    assert places(text, [FIRST, SECOND, THIRD, LAST]) == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("2B0 free send free 0B0", 2),
        ("2B0 free recv send send free 0B0 send", 4),
        ("2B0 free recv 0B0 send", 0),
        ("0B0 2B0 free send", 3),
    ],
)
def test_gradients_of_activations_are_sent_before_a_reduction(text: str, place: int) -> None:
    (index,) = (index for index, weights in places(text, [frozenset(), SECOND, THIRD, LAST]).items() if 2 in weights)
    assert index == place


def test_a_weight_of_several_stages_is_complete_with_the_last_of_them() -> None:
    assert places("2B0 2B1 0B0 0B1", [frozenset({7, 0}), SECOND, frozenset({7, 2}), LAST]) == {1: {2}, 3: {0, 7}}
    assert places("0B0 2B0", [frozenset({7}), SECOND, frozenset({7}), LAST]) == {1: {7}}


def test_the_loss_may_use_any_weight() -> None:
    """No gradient is complete before the last stage is over, if that is on this rank."""
    assert places("3I0 0I0 0W0 3W0", [FIRST, SECOND, THIRD, LAST]) == {3: {0, 3}}
    assert places("3I0 3W0 0I0 0W0", [FIRST, SECOND, THIRD, LAST]) == {1: {3}, 3: {0}}


def test_every_weight_is_complete_at_one_index() -> None:
    for kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
        text = " ".join(f"{stage}{kind.value}{m}" for m in range(3) for stage in (2, 0))
        complete = places(text, [frozenset({1, 2, 3}), SECOND, frozenset({3, 4}), LAST])
        assert sorted(weight for weights in complete.values() for weight in weights) == [1, 2, 3, 4]
