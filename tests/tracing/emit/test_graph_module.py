"""A finished recording: outputs as the model has them, and inputs that are those it was made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing import trace
from tests.support.cuts import cut, run_stages


class Summing(nn.Module):
    def forward(self, parts: list[torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"sum": sum(parts) * scale, "first": parts[0]}


def test_outputs_keep_their_structure_and_inputs_come_out_as_they_are() -> None:
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    made = pc.trace(Summing(), [x, x])([x, y])
    assert list(made) == ["sum", "first"]
    assert torch.equal(made["sum"], x + y)
    assert torch.equal(made["first"], x)


@pytest.mark.parametrize("given", [1, 3])
def test_a_list_of_another_length_is_refused(given: int) -> None:
    graph = pc.trace(Summing(), [torch.randn(4, 2)] * 2)
    with pytest.raises(pc.InputError, match="recorded with 2 values in its inputs"):
        graph([torch.randn(4, 2)] * given)
    pipe = pc.compile(Summing(), 1, n_microbatches=2, cost="analytic")
    for count in (2, given):
        parts = [torch.randn(4, 2) for _ in range(count)]
        assert torch.equal(pipe(parts)["sum"], sum(parts))


class Average(nn.Module):
    """Keeps a running mean by replacing its buffer, and uses it before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("grid", torch.zeros(1))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.grid = torch.arange(4.0)
        self.steps = self.steps + 1
        return self.b(h - self.mean) * self.grid + self.steps


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),)


def test_a_replaced_buffer_is_written_in_every_run(agrees):
    model = Average()
    before = model.mean
    agrees(model, rows)
    assert model.mean is before
    assert model.steps == 3


def test_a_table_of_another_shape_is_computed_in_every_run_and_left_on_the_model():
    model = Average()
    graph = trace(model, *rows(3))
    assert model.grid.shape == (1,)
    made = graph(*rows(3))
    assert torch.equal(model.grid, torch.arange(4.0))
    assert torch.equal(made, Average.forward(_copied(model), *rows(3)))


def _copied(model: Average) -> Average:
    twin = Average()
    twin.load_state_dict(
        {**model.state_dict(), "grid": torch.zeros(1), "mean": torch.ones(4), "steps": torch.tensor(0)}
    )
    return twin


@pytest.mark.parametrize("bound", range(8))
def test_readers_and_the_writer_are_never_cut_apart(bound):
    model, twin = Average(), Average()
    twin.load_state_dict(model.state_dict())
    graph = trace(model, *rows(3))
    assert bound < len(compute_nodes(graph))
    for _ in range(2):
        assert torch.equal(run_stages(graph, cut(graph, [bound]), 3, *rows(3)), twin(*rows(3)))
    assert torch.equal(model.mean, twin.mean)
