"""An opaque module runs the user's code, checks its result, and on fake tensors returns what it expects."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipecompile import TraceError
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.opaque_module import ExpectedLeaf, ExpectedResult, OpaqueModule

BATCH, ROWS = sympy.symbols("batch rows", integer=True, positive=True)
STRUCTURE = pytree.tree_structure((0, 0))


class Part(nn.Module):
    """Returns `made(x)`, whatever a test wants."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 4), made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(x)


def opaque(made: Any, *leaves: ExpectedLeaf, conditions: tuple[sympy.Basic, ...] = ()) -> OpaqueModule:
    module = OpaqueModule(Piece("part"), Part(made), BATCH)
    expected = ExpectedResult(STRUCTURE, leaves, 2, ((8.0, 16.0, torch.float32),), 100, {ROWS}, conditions, {ROWS: 3})
    module.expected_results.append(expected)
    return module


ROWS_LEAF = ExpectedLeaf((ROWS, 4), torch.float32)
BATCH_LEAF = ExpectedLeaf((2 * BATCH,), torch.float32, requires_grad=True)


def test_the_result_of_the_users_code_is_passed_on() -> None:
    x = torch.ones(3, 4)
    module = opaque(lambda x: (x[:2], x.sum(1).repeat(2)), ROWS_LEAF, BATCH_LEAF)
    rows, sums = module(0, 3, x)
    assert rows.shape == (2, 4)
    assert torch.equal(sums, torch.full((6,), 4.0))
    assert [name for name, _ in module.named_parameters()] == ["module.layer.weight", "module.layer.bias"]


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda x: x, r"its structure: 1 leaf: \(3, 4\)"),
        (lambda x: (x, x), r"output 1: torch.float32 \(3, 4\) instead of torch.float32 \(6,\)"),
        (lambda x: (x, x.sum(1).repeat(2).double()), r"output 1: torch.float64 \(6,\) instead of torch.float32 \(6,\)"),
        (lambda x: (x, 7), "output 1: an int instead of a tensor"),
        (lambda x: (x[:1], x.sum(1).repeat(2)), "its sizes: rows > 1 does not hold with rows = 1"),
    ],
)
def test_another_result_is_refused(made: Any, fault: str) -> None:
    module = opaque(made, ROWS_LEAF, BATCH_LEAF, conditions=(sympy.Gt(ROWS, 1, evaluate=False),))
    with pytest.raises(TraceError, match=f"PC112.*part, kept whole, .*{fault}"):
        module(0, 3, torch.ones(3, 4))


def test_one_size_must_be_the_same_wherever_it_is_expected() -> None:
    module = opaque(lambda x: (x[:2], x[:1]), ROWS_LEAF, ROWS_LEAF)
    with pytest.raises(TraceError, match=r"output 1: .*\(1, 4\) instead of .*\(2, 4\)"):
        module(0, 3, torch.ones(3, 4))


def test_plain_values_are_compared() -> None:
    module = opaque(
        lambda x: (x, float("nan")), ExpectedLeaf((BATCH, 4), torch.float32), ExpectedLeaf(value=float("nan"))
    )
    module(0, 3, torch.ones(3, 4))
    module = opaque(lambda x: (x, "b"), ExpectedLeaf((BATCH, 4), torch.float32), ExpectedLeaf(value="a"))
    with pytest.raises(TraceError, match="'b' instead of 'a'"):
        module(0, 3, torch.ones(3, 4))


def test_on_fake_tensors_the_users_code_does_not_run() -> None:
    module = opaque(lambda x: 1 / 0, ROWS_LEAF, BATCH_LEAF)
    saved: list[torch.Tensor] = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None),
    ):
        rows, sums = module(0, 6, torch.empty(6, 4))
    assert (rows.shape, rows.requires_grad) == ((3, 4), False)
    assert (sums.shape, sums.requires_grad) == ((12,), True)
    assert sum(tensor.nbytes for tensor in saved) == 300
    assert module.kernels(0, 6) == ((24.0, 48.0, torch.float32),)


def test_a_method_counts_the_tensors_that_it_was_seen_to_use() -> None:
    part = Part(lambda x: x)
    module = OpaqueModule(Piece("part", "forward"), part, BATCH)
    buffer = torch.zeros(2)
    module.hold([part.layer.weight, buffer, part.layer.weight])
    assert [id(tensor) for tensor in module.parameters()] == [id(part.layer.weight)]
    assert [id(tensor) for tensor in module.buffers()] == [id(buffer)]
