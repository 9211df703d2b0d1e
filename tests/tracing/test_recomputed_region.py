"""Regions of the user's checkpointing as facts of nodes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipecompile.tracing import trace
from pipecompile.tracing.graph_parser import parse_graph
from pipecompile.tracing.node_facts import facts
from tests.support.checkpointed import Functional, Net

PLAIN = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def nested(m, x):
    inner = functools.partial(checkpoint, m.b, use_reentrant=True, preserve_rng_state=False)
    return checkpoint(lambda h: inner(m.a(h)), m.a(x), use_reentrant=False, context_fn=PLAIN, early_stop=False)


def test_regions_know_the_call_and_the_region_around():
    graph = trace(Functional(nested), torch.randn(3, 4))
    outside, outer, inner = (facts(node).region for node in graph.graph.nodes if node.op == "call_module")
    assert outside is None
    assert inner.path == (outer, inner)
    assert dict(outer.options) == {
        "use_reentrant": False, "preserve_rng_state": True, "context_fn": PLAIN, "early_stop": False
    }  # fmt: skip
    assert (inner.is_reentrant, inner.keeps_draws, inner.is_selective) == (True, True, True)
    assert "test_recomputed_region.py" in inner.source


@pytest.mark.parametrize("model", [Net(True), Net(False), Functional(nested)], ids=["reentrant", "plain", "nested"])
def test_the_text_of_a_graph_has_its_regions(model):
    graph = trace(model, torch.randn(3, 4))
    assert "region 0: (None, 0, {'use_reentrant': " in str(graph)
    assert parse_graph(str(graph)) == graph


def test_a_call_without_gradients_is_no_region():
    def body(m, x):
        with torch.no_grad():
            return checkpoint(m.a, x, use_reentrant=False)

    graph = trace(Functional(body), torch.randn(3, 4))
    assert all(facts(node).region is None for node in graph.graph.nodes)
