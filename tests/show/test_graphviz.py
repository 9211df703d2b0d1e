"""The Graphviz text of a cut graph."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from torch import fx, nn

from pipecompile.ir import HOST, Route
from pipecompile.ir.plan import Plan
from pipecompile.show.graphviz import graph_dot
from pipecompile.tracing.node_facts import facts, note


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(4, 4, 3), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x)) * 2


class Skipping(nn.Module):
    """in -> a -> b -> c -> out      and the skip  a -> c  over b's stage"""

    def __init__(self, depth=1):
        super().__init__()
        self.a, self.c = Block(), Block()
        self.b = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y) + y)


def traced(model, stage_of_module):
    """The graph as the recorder leaves it: `module` in the meta, a stage for everything but the ends."""
    graph = fx.symbolic_trace(model)
    stage_of = {}
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        note(node, module=next(reversed(stack), "") if node.op != "call_module" else node.target.rpartition(".")[0])
        if node.op not in ("placeholder", "output"):
            owner = node.target if node.op == "call_module" else facts(node).module
            stage_of[node.name] = stage_of_module[owner.split(".")[0]]
    return graph, stage_of


@pytest.fixture
def cut():
    graph, stage_of = traced(Skipping(), {"a": 0, "b": 1, "": 2, "c": 2})
    last = {stage: [name for name, s in stage_of.items() if s == stage][-1] for stage in range(3)}
    routes = (
        Route("x", HOST, (0,), 2.0**20, gradient=False),
        Route(last[0], 0, (1, 2), 3 * 2.0**20),
        Route(last[1], 1, (2,), 2.0**20),
        Route(last[2], 2, (HOST,), 2.0**20),
    )
    return graph, Plan("f", 3, ("cpu", "gpu"), (0, 1, 0), stage_of, routes, (), 1.0, 1.0, "optimal", "dp", "analytic")


def parts(dot):
    """Box labels per cluster, and the edges as (from, to, attributes) in labels."""
    boxes = {
        name: label.split("\\n")[0] for name, label in re.findall(r'^ +(n\d+) \[label="([^"]*)"', dot, re.MULTILINE)
    }
    clusters = {
        int(stage): [boxes[name] for name in re.findall(r"^ +(n\d+) \[", body, re.MULTILINE)]
        for stage, body in re.findall(r"subgraph cluster_(\d+) \{(.*?)\n  \}", dot, re.DOTALL)
    }
    edges = {(boxes[a], boxes[b]): look or "" for a, b, look in re.findall(r"(n\d+) -> (n\d+)(?: \[(.*)\])?;", dot)}
    return clusters, edges


def test_a_cluster_per_stage_with_its_modules(cut):
    dot = graph_dot(*cut, depth=1)
    clusters, _ = parts(dot)
    assert clusters == {0: ["a"], 1: ["b"], 2: ["add", "c"]}
    assert 'label="stage 1 · gpu"' in dot
    assert 'label="stage 2 · cpu"' in dot
    assert 'label="a\\n3 calls"' in dot


def test_crossing_edges_bear_their_size_and_skips_are_bold(cut):
    _, edges = parts(graph_dot(*cut, depth=1))
    assert edges["a", "b"] == 'label="3.00 MiB"'
    assert 'label="3.00 MiB"' in edges["a", "add"]
    assert 'style="bold"' in edges["a", "add"]
    assert [pair for pair, look in edges.items() if "bold" in look] == [("a", "add")]
    assert ("x", "a") in edges
    assert ("c", "output") in edges


def test_the_size_of_a_value_stands_once_per_stage_that_receives_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Block(), Block(), Block()

        def forward(self, x):
            y = self.a(x)
            return self.b(y) + self.c(y)

    graph, stage_of = traced(Twice(), {"a": 0, "b": 1, "c": 1, "": 1})
    value = [name for name, stage in stage_of.items() if stage == 0][-1]
    plan = Plan(
        "f", 2, ("cpu",), (0, 0), stage_of, (Route(value, 0, (1,), 512.0),), (), 1.0, 1.0, "optimal", "dp", "analytic"
    )
    _, edges = parts(graph_dot(graph, plan, depth=1))
    assert edges["a", "b"] == 'label="512 B"'
    assert edges["a", "c"] == ""


def test_depth_follows_the_number_of_boxes(cut):
    deep, _ = parts(graph_dot(*cut))
    assert deep[0] == ["a.conv", "a.act", "a.mul"]
    blocks, _ = parts(graph_dot(*deeper(30)))
    assert blocks[1] == [f"b.{i}" for i in range(30)]
    lumps, _ = parts(graph_dot(*deeper(60)))
    assert lumps == {0: ["a"], 1: ["b"], 2: ["add", "c"]}
    nothing, _ = parts(graph_dot(*cut, depth=0))
    assert nothing == {0: ["(root)"], 1: ["(root)"], 2: ["(root)"]}


def deeper(depth):
    graph, stage_of = traced(Skipping(depth), {"a": 0, "b": 1, "": 2, "c": 2})
    return graph, Plan("f", 3, ("cpu",), (0, 0, 0), stage_of, (), (), 1.0, 1.0, "optimal", "dp", "analytic")


def test_two_calls_of_one_module_are_two_boxes_and_make_no_cycle():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.fc = nn.ReLU(), nn.Linear(2, 2)

        def forward(self, x):
            return self.act(self.fc(self.act(x)))

    graph, stage_of = traced(Again(), {"act": 0, "fc": 0})
    plan = Plan("f", 1, ("cpu",), (0,), stage_of, (), (), 1.0, 1.0, "optimal", "dp", "analytic")
    dot = graph_dot(graph, plan)
    assert parts(dot)[0] == {0: ["act", "fc", "act"]}
    assert re.findall(r"(n\d+) -> (n\d+)", dot) == [("n0", "n1"), ("n1", "n2"), ("n2", "n3"), ("n3", "n4")]


def test_nodes_without_a_stage_are_left_out(cut):
    graph, plan = cut
    placeholder = next(iter(graph.graph.nodes))
    with graph.graph.inserting_after(placeholder):
        graph.graph.call_method("size", (placeholder, 0))
    assert '[label="size"' not in graph_dot(graph, plan)


def test_awkward_names_are_quoted(cut):
    graph, plan = cut
    note(next(node for node in graph.graph.nodes if node.name == "add"), module='say "hi"\\')
    assert r'[label="say \"hi\"\\.add"]' in graph_dot(graph, plan)


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_graphviz_reads_it(cut):
    done = subprocess.run(["dot", "-Tsvg"], input=graph_dot(*cut), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_braces_balance_and_every_edge_joins_known_boxes(cut):
    dot = graph_dot(*cut)
    known = set(re.findall(r"^ +(n\d+) \[", dot, re.MULTILINE))
    assert dot.count("{") == dot.count("}")
    assert {end for pair in re.findall(r"(n\d+) -> (n\d+)", dot) for end in pair} <= known
