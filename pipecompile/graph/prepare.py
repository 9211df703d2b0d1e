"""The passes over graphs, put together: before the cut on the traced graph, after it on the graph of each stage.

traced graph ──▶ aliasing ──▶ traced graph with its ties
stage graph ──▶ follow_device ──▶ stage graph on its device
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from pipecompile.graph.colocation import note_ties
from pipecompile.graph.device_placement import follow_device
from pipecompile.ir.pass_manager import Pass, PassManager, watch
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.traced_graph import verify_graph

__all__ = ["prepare", "place_on_device"]


def prepare(graph: TracedGraph, *, dump: Callable[[str], object] | None = None) -> TracedGraph:
    """Note the ties of a traced graph, so that it can be cut. Raise VerifyError for an illegal graph; `dump` gets the text of each pass."""
    prepared: TracedGraph = PassManager((Pass("aliasing", note_ties, verify_graph),)).run(graph, watch(dump))
    return prepared


def place_on_device(graph: fx.Graph, recorded: torch.device, device: torch.device) -> fx.Graph:
    """Rewrite a stage's graph, recorded on one device, for another device."""
    follow = partial(follow_device, recorded=recorded, device=device)
    settled: fx.Graph = PassManager((Pass("follow_device", follow, fx.Graph.lint),)).run(graph, watch())
    return settled
