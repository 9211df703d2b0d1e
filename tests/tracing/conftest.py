"""The question that most tests here ask: does the recorded graph do what the model does?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipecompile.tracing import trace

Inputs = Callable[[int], Sequence[Any]]
"""The positional arguments for a batch of so many samples."""


@pytest.fixture
def agrees() -> Callable[..., fx.GraphModule]:
    """`agrees(model, inputs)`: bit-equal outputs, gradients and buffers at other batch sizes than the traced one."""
    return _agrees


def _agrees(model: nn.Module, inputs: Inputs, *, sizes: Sequence[int] = (1, 3, 5), traced: int = 4) -> fx.GraphModule:
    twin = copy.deepcopy(model)
    graph = trace(model, *inputs(traced))
    for size in sizes:
        args = inputs(size)
        made, expected = _run(graph, args), _run(twin, args)
        assert pytree.tree_structure(made) == pytree.tree_structure(expected)
        assert_equal(made, expected, f"output at {size}")
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], f"gradient at {size}")
        assert_equal(list(model.buffers()), list(twin.buffers()), f"buffer at {size}")
    return graph


def _run(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    torch.manual_seed(0)
    made = call(*pytree.tree_map_only(torch.Tensor, lambda t: t.clone().detach().requires_grad_(t.requires_grad), args))
    wanted = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
    if wanted:
        sum((t.abs() ** 2).sum() for t in wanted).backward()
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)


def assert_equal(made: Any, expected: Any, what: str) -> None:
    for a, b in zip(pytree.tree_leaves(made), pytree.tree_leaves(expected), strict=True):
        assert type(a) is type(b), what
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        assert same, f"{what}: {a} is not {b}"
