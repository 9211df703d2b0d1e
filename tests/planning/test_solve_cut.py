"""Tied weights and the cut: together where that is free, apart where it pays, as asked where it was asked."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import note_ties
from pipecompile.partitioners import Progress
from pipecompile.planning.solve_cut import _ProgressLine, tied_groups

X = torch.randn(6, 16)


class Chain(nn.Sequential):
    """Three small layers and a large one; the small ones fit into two stages in two ways that are equally good."""

    def __init__(self, *tied: int) -> None:
        super().__init__(
            *[nn.Linear(16, 16) for _ in range(3)], nn.Linear(16, 10_000) if tied[-1:] != (3,) else nn.Linear(16, 16)
        )
        for layer in tied:
            self[layer].weight = self[tied[0]].weight


def plan(model: nn.Module, tied: str, n_stages: int = 3) -> pc.Plan:
    return pc.compile(
        model, n_stages, example_args=(X,), n_microbatches=2, devices=["cpu"] * n_stages, cost="analytic", tied=tied
    ).plan


def test_together_where_it_is_free() -> None:
    free = [(0, 1), (1, 2)]
    apart = {pair: plan(Chain(*pair), "apart") for pair in free}
    assert any(found.stage_of[f"_{a}"] != found.stage_of[f"_{b}"] for (a, b), found in apart.items())
    for a, b in free:
        found = plan(Chain(a, b), "auto")
        assert found.stage_of[f"_{a}"] == found.stage_of[f"_{b}"]
        assert found.bottleneck == apart[a, b].bottleneck
        assert found.status == "optimal"


def test_apart_where_it_pays_unless_asked() -> None:
    found = plan(Chain(0, 3), "auto", 2)
    assert found.stage_of["_0"] != found.stage_of["_3"]
    asked = plan(Chain(0, 2), "together", 2)
    assert asked.stage_of["_0"] == asked.stage_of["_1"] == asked.stage_of["_2"]
    with pytest.raises(pc.PartitionError, match="tied weights together") as caught:
        plan(Chain(0, 3), "together", 2)
    assert "0.weight: _0 ... _3" in str(caught.value)
    with pytest.raises(pc.InputError, match="tied='never'"):
        plan(Chain(0, 1), "never")


def test_groups_of_a_graph() -> None:
    model = Chain(0, 2)
    assert tied_groups(note_ties(pc.trace(model, X))) == {"0.weight": ("_0", "_2")}
    assert tied_groups(note_ties(pc.trace(Chain(), X))) == {}


def test_the_progress_of_the_solver_is_a_line() -> None:
    progress = _ProgressLine(4)
    assert progress.line == "cutting into 4 stages"
    progress(Progress("orders", inf, 0.0, 0.2))
    assert progress.line == "cutting into 4 stages, orders"
    progress(Progress("program", 0.01, 0.0095, 7.6))
    assert progress.line == "cutting into 4 stages, program: slowest 10.0 ms, at least 9.5 ms, gap 5.0%"
