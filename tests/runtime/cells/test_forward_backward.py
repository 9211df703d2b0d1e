"""F and B of a cell on registers, without a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipecompile.runtime.cells.divided_backward import DividedBackward
from pipecompile.runtime.cells.forward_backward import (
    backward_cell,
    edge_of,
    forward_cell,
    forward_with_graph,
    input_cell,
    weight_cell,
)
from pipecompile.runtime.registers import Frame

X, OUT, SAVED, GRADIENT, SENT, REMAINDER = range(6)


def frame(x: torch.Tensor) -> Frame:
    return Frame([x, None, None, torch.tensor([5.0]), None, None], [], sizes=(7,))


def doubled(weight: torch.Tensor) -> Any:
    def stage(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x * weight,)

    return stage


def test_forward_detaches_and_backward_sends_the_gradient_of_the_input() -> None:
    weight, before = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    made = frame(before * 1)
    forward_cell(doubled(weight), [X], [OUT], SAVED, None, casts=False)(made)
    assert made.registers[OUT].item() == 6
    backward_cell(SAVED, [(0, [GRADIENT])], [(SENT, 0)])(made)
    assert made.registers[SENT].item() == 10
    assert weight.grad == torch.tensor([15.0])
    assert before.grad is None, "the graph of the cell ends at its leaf"


def test_inference_detaches_nothing() -> None:
    made = frame(x := torch.ones(1))
    forward_cell(lambda value: (value,), [X], [OUT], None, None, casts=False)(made)
    assert made.registers[OUT] is x
    assert made.registers[SAVED] is None


def test_the_size_of_the_micro_batch_is_the_last_argument() -> None:
    made = frame(torch.ones(1))
    forward_cell(lambda value, size: (value * size,), [X], [OUT], None, 0, casts=False)(made)
    assert made.registers[OUT].item() == 7


def test_i_and_w_give_together_what_b_gives() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    made, divided = frame(torch.tensor([3.0], requires_grad=True)), DividedBackward()
    forward_cell(doubled(weight), [X], [OUT], SAVED, None, casts=False)(made)
    input_cell(SAVED, [(0, [GRADIENT])], [(SENT, 0)], REMAINDER, divided)(made)
    weight_cell(REMAINDER, divided)(made)
    assert (made.registers[SENT].item(), weight.grad) == (10, torch.tensor([15.0]))


def test_gradients_of_an_output_are_added_and_missing_ones_are_skipped() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    made = frame(torch.tensor([3.0], requires_grad=True))
    forward_cell(doubled(weight), [X], [OUT], SAVED, None, casts=False)(made)
    backward_cell(SAVED, [(0, [GRADIENT, REMAINDER, GRADIENT])], [(SENT, 0)])(made)
    assert made.registers[SENT].item() == 20


def test_without_any_gradient_backward_does_nothing() -> None:
    made = frame(torch.tensor([3.0], requires_grad=True))
    forward_cell(lambda x: (x * 2,), [X], [OUT], SAVED, None, casts=False)(made)
    backward_cell(SAVED, [(0, [REMAINDER])], [(SENT, 0)])(made)
    assert made.registers[SENT] is None


def test_only_inputs_that_require_a_gradient_get_leaves() -> None:
    _, graph = forward_with_graph(
        lambda a, b, n: (a + b,), [torch.ones(1), torch.ones(1, requires_grad=True), 3], (), casts=False
    )
    assert [leaf is None for leaf in graph.leaves] == [True, False, True]
    assert not graph.has_hooks


def test_autocast_casts_each_use_of_an_input() -> None:
    """A leaf would be cast once and cached, as a weight is: then gradients of its uses meet in bfloat16."""
    seen: list[torch.Tensor] = []

    def stage(x: torch.Tensor) -> Sequence[torch.Tensor]:
        seen.append(x)
        return (x,)

    x = torch.ones(1, requires_grad=True)
    forward_with_graph(stage, [x], (), casts=False)
    with torch.autocast("cpu", torch.bfloat16):
        forward_with_graph(stage, [x], (), casts=False)
    forward_with_graph(stage, [x], (), casts=True)
    assert [value.is_leaf for value in seen] == [True, False, False]


def test_hooks_registered_by_the_stage_are_noticed() -> None:
    def stage(x: torch.Tensor) -> Sequence[torch.Tensor]:
        made = x * 2
        made.register_hook(lambda gradient: gradient)
        return (made,)

    assert forward_with_graph(stage, [torch.ones(1, requires_grad=True)], (), casts=False)[1].has_hooks


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


@pytest.mark.parametrize("function", [torch.exp, Tripled.apply, lambda x: x.chunk(2)[1]])
def test_the_edge_of_an_output_is_where_its_gradient_enters(function: Any) -> None:
    x = torch.zeros(2, requires_grad=True)
    output = function(x)
    edge = edge_of(output)
    assert edge is not None
    assert (edge.node, edge.output_nr) == (output.grad_fn, output.output_nr)


def test_the_edge_of_a_leaf_is_its_accumulation() -> None:
    x = torch.zeros(2, requires_grad=True)
    edge = edge_of(x)
    assert edge is not None
    assert edge.node.variable is x  # type: ignore[attr-defined]


def test_a_view_made_without_gradients_has_no_edge() -> None:
    base = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        view = base.view_as(base)
    assert view.requires_grad, "torch says so, and yet no gradient can enter"
    assert edge_of(view) is None


@pytest.mark.parametrize("divided", [False, True])
def test_a_gradient_that_is_sent_shares_no_memory_with_that_of_a_weight(divided: bool) -> None:
    """Autograd makes both gradients of `x.view + weight.view` in one memory, and the next micro-batch adds to the weight's."""
    weight = torch.ones(4, requires_grad=True)

    def stage(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (((x.view(2, 2) + weight.view(2, 2)) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum(),)

    sent = []
    for _ in range(2):
        made = frame(torch.ones(4, requires_grad=True))
        made.registers[GRADIENT] = torch.tensor(1.0)
        forward_cell(stage, [X], [OUT], SAVED, None, casts=False)(made)
        if divided:
            half = DividedBackward()
            input_cell(SAVED, [(0, [GRADIENT])], [(SENT, 0)], REMAINDER, half)(made)
            weight_cell(REMAINDER, half)(made)
        else:
            backward_cell(SAVED, [(0, [GRADIENT])], [(SENT, 0)])(made)
        sent.append(made.registers[SENT])
    assert [gradient.tolist() for gradient in sent] == [[1, 2, 3, 4]] * 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 4, 6, 8]
