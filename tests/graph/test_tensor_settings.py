"""Calls that change a tensor itself stay with it: hooks with the call that makes it, flags of a weight with all of its users."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import ties_with_copies
from pipecompile.graph.tensor_settings import changed_tensors, flagged_memory
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import facts
from tests.support.eager import accumulate, assert_same


class Body(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def toggled(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.b.requires_grad_(False)
    h = m.d(m.b(h).tanh())
    m.b.requires_grad_(True)
    return m.c(m.b(h))


def assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.b.weight.requires_grad = False
    h = m.d(m.b(h).tanh())
    m.b.weight.requires_grad = True
    return m.c(m.b(h))


def frozen_at_the_end(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.b.weight.requires_grad_(True)
    h = m.b(m.a(x)).tanh()
    m.b.weight.requires_grad_(False)
    return m.c(m.d(h))


def thawed(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.b(m.a(x)).tanh()
    m.b.requires_grad_(True)
    return m.c(m.d(m.b(h)))


def late_hook(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x).tanh()
    k = m.c(m.d(m.b(h)))
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return k + h.square()


def groups(body: Any) -> list[str]:
    found, _ = ties_with_copies(trace(Body(body), torch.randn(2, 4)))
    return [" ".join(group) for group in found.groups if len(group) > 1]


def test_what_sets_a_flag_and_all_users_of_the_weight_are_tied() -> None:
    (group,) = groups(toggled)
    assert {"requires_grad", "requires_grad_3", "b", "b_1"} <= set(group.split())
    assert "a" not in group.split()
    (group,) = groups(assigned)
    assert {"b", "b_1"} <= set(group.split())


def test_a_late_hook_stays_with_the_call_that_makes_its_tensor() -> None:
    assert groups(late_hook) == ["tanh register_hook"]


def test_flags_and_hooks_are_found_in_a_graph() -> None:
    graph = trace(Body(toggled), torch.randn(2, 4))
    weights = [one for node in graph.graph.nodes if node.name in ("b_weight", "b_bias") for one in facts(node).storages]
    assert flagged_memory(graph.graph.nodes) == set(weights)
    hooked = trace(Body(late_hook), torch.randn(2, 4))
    (tanh,) = (node for node in hooked.graph.nodes if node.name == "tanh")
    assert changed_tensors(hooked.graph.nodes) == facts(tanh).storages


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", [toggled, assigned, frozen_at_the_end, thawed, late_hook])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"dispatch": "threads"}], ids=str)
def test_gradients_and_flags_are_those_of_the_loop(body: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, target = Body(body), torch.randn(8, 4), torch.randn(8, 4)
    model.b.requires_grad_(body is not thawed)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=nn.functional.mse_loss, cost="analytic", **options)
    for _ in range(2):
        pipe.step(x, target=target)
        accumulate(eager, x, 4, nn.functional.mse_loss, target)
    assert_same(model, eager, 1e-6)
    assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in eager.parameters()]
