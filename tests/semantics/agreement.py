"""The comparison of a case: the recorded graph, and the pipeline cut everywhere, do what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import pipecompile as pc
from pipecompile.graph.colocation import note_ties
from pipecompile.graph.separable_pieces import separable_pieces
from tests.semantics.case import Case
from tests.semantics.observation import called, difference, looped

__all__ = ["agrees", "piped", "recorded"]

Make = Callable[[nn.Module, Case], Callable[..., Any]]


def agrees(case: Case, make: Make, count: int, sizes: tuple[int, ...]) -> None:
    """Fail unless `make(model)` gives, call after call, what the loop over `count` micro-batches gives, or refuses the model."""
    model, eager = _fresh(case), _fresh(case)
    if case.refused:
        with pytest.raises(pc.PipecompileError, match=case.refused):
            called(model, make(model, case), case, sizes)
        return
    expected = called(eager, looped(eager, count), case, sizes)
    actual = called(model, make(model, case), case, sizes)
    assert not difference(actual, expected, case.tolerance)


def _fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def recorded(model: nn.Module, case: Case) -> Callable[..., Any]:
    """Return a call that records one graph per mode, at another batch size than that of the call."""
    graphs: dict[bool, fx.GraphModule] = {}

    def call(*args: Any) -> Any:
        if model.training not in graphs:
            graphs[model.training] = pc.trace(model, *case.inputs(6))
        return graphs[model.training](*args)

    return call


def piped(model: nn.Module, case: Case, *, n_stages: int = 99, dispatch: str = "inline") -> pc.Pipeline:
    """Return a pipeline of 2 micro-batches, or of one where samples meet, with as many stages as the model has pieces, at most `n_stages`."""
    with case.around():
        graph = note_ties(pc.trace(model, *case.inputs(2)))
    n_stages = max(1, min(n_stages, len(separable_pieces(graph))))
    return pc.compile(
        model,
        n_stages,
        n_microbatches=1 if case.mixes else 2,
        cost="analytic",
        devices=["cpu"] * n_stages,
        dispatch=dispatch,
    )
