"""Regions of grad mode and autocast in recorded graphs."""

from __future__ import annotations

import gc

import torch
from torch import fx, nn

from pipecompile.tracing import trace
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.ambient_regions import Regions
from pipecompile.tracing.recorder import Recorder


class Frozen(nn.Module):
    """Its first layer runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


def names_of(graph: fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", "") for node in graph.nodes]


def recorders() -> list[Recorder]:
    return [alive for alive in gc.get_objects() if type(alive) is Recorder]


def modes(*, grad: bool = True, dtype: str | None = None, nesting: int = 0) -> Ambient:
    return Ambient(grad, (("cpu", dtype, True),), nesting)


def test_nothing_is_emitted_while_the_modes_stay() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes())
    regions.close()
    assert not list(graph.nodes)


def test_grad_mode_goes_off_and_back_to_the_callers() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(grad=False))
    regions.close()
    before, off, back = graph.nodes
    assert names_of(graph) == ["enabled", "_set_grad_enabled", "_set_grad_enabled"]
    assert (off.args, back.args) == ((False,), (before,))


def test_autocast_is_entered_once_per_region_and_left_before_the_next() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(dtype="float16", nesting=1))
    regions.close()
    assert names_of(graph) == ["_enter_autocast", "_exit_autocast", "_enter_autocast", "_exit_autocast"]
    first, left, second, last = graph.nodes
    assert (first.args[1], second.args[1]) == (torch.bfloat16, torch.float16)
    assert (left.args, last.args) == ((first,), (second,))


def test_a_nested_region_is_left_alone() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(nesting=2))
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.close()
    assert names_of(graph) == ["_enter_autocast", "_enter_autocast", "_exit_autocast", "_exit_autocast"]


def test_a_graph_with_regions_does_not_keep_its_recorder_alive() -> None:
    """Until 2026-11 the graph called the function that stands in for `torch.is_grad_enabled` while a model is recorded."""
    before = {id(recorder) for recorder in recorders()}
    graph = trace(Frozen(), torch.randn(3, 4))
    gc.collect()
    assert {id(recorder) for recorder in recorders()} <= before
    assert "<locals>" not in str(graph)
    out = graph(torch.randn(2, 4))
    assert out.requires_grad
    assert torch.is_grad_enabled()
