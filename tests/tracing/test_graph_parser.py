"""Graphs read from their text: what they can do, what they cannot, and texts that cannot be read."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.stages import routes, split
from pipecompile.tracing import trace
from pipecompile.tracing.graph_parser import parse_graph
from pipecompile.tracing.graph_text import ModuleStub
from pipecompile.tracing.qualified_names import Named
from pipecompile.tracing.traced_graph import TracedGraph
from tests.support.cpu_time import assert_within
from tests.support.models import UNet


@pytest.fixture(scope="module")
def recorded() -> TracedGraph:
    return note_ties(trace(UNet(depth=1), torch.randn(3, 3, 16, 16)))


def test_a_parsed_graph_is_cut_like_the_recorded_one(recorded: TracedGraph) -> None:
    parsed = parse_graph(str(recorded))
    nodes = [node.name for node in compute_nodes(parsed)]
    stage_of = {name: int(index > len(nodes) // 2) for index, name in enumerate(nodes)}
    plan_routes = routes(parsed, stage_of)
    assert plan_routes == routes(recorded, stage_of)
    assert routes(parsed, stage_of, samples=5) == routes(recorded, stage_of, samples=5)
    devices = [torch.device("cpu")] * 2
    pairs = zip(
        split(parsed, plan_routes, stage_of, devices), split(recorded, plan_routes, stage_of, devices), strict=True
    )
    for mine, other in pairs:
        assert (mine.inputs, mine.outputs, mine.nodes) == (other.inputs, other.outputs, other.nodes)


def test_ties_are_computed_anew_from_a_text_without_ties(recorded: TracedGraph) -> None:
    bare = copy_without_ties(recorded)
    assert bare.facts.ties is None
    assert note_ties(bare).facts.ties == recorded.facts.ties


class Twice(nn.Module):
    """An opaque piece that is called twice, and so has all its calls in one stage."""

    class Router(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 1e9 else x + 1

    def __init__(self) -> None:
        super().__init__()
        self.router = self.Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.router(x).relu())


def test_the_calls_of_an_opaque_piece_are_tied_also_in_a_parsed_graph() -> None:
    graph = note_ties(trace(Twice(), torch.randn(6, 4)))
    assert graph.facts.ties is not None
    assert graph.facts.ties.groups == (("router", "router_1"),)
    assert note_ties(copy_without_ties(graph)).facts.ties == graph.facts.ties


def copy_without_ties(graph: TracedGraph) -> TracedGraph:
    parsed = parse_graph(str(graph))
    parsed.facts = replace(parsed.facts, ties=None)
    return parse_graph(str(parsed))


def test_parameters_are_on_meta_and_modules_cannot_run(recorded: TracedGraph) -> None:
    parsed = parse_graph(str(recorded))
    assert isinstance(parsed.get_submodule("down.0.conv1"), ModuleStub)
    assert {tensor.device.type for tensor in parsed.parameters()} == {"meta"}
    assert [tuple(p.shape) for p in parsed.parameters()] == [tuple(p.shape) for p in recorded.parameters()]
    with pytest.raises(InputError, match="a graph that was read from its text cannot run"):
        parsed(torch.randn(3, 3, 16, 16))


def test_the_mode_and_the_name_of_the_model_are_kept() -> None:
    parsed = parse_graph(str(trace(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(3, 4))))
    assert type(parsed).__name__ == "Sequential"
    assert not parsed.training
    assert parsed.facts.names == ("input",)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            "down_0_conv1 = call_module down.0.conv1(x)",
            "down_0_conv1 = call_module down.0.conv1(y)",
            "'y' is not a node above",
        ),
        ("float32[3", "float33[3", "float33 is not a dtype"),
        ("device cpu", "devices cpu", "'devices cpu' is not a line of a header"),
        ("pool = call_module", "pool : call_module", "is out of place"),
        (" | mode 0 |", " | mode 7 |", "cannot be read"),
        (" | mode 0 |", " | modes 0 |", "cannot be read"),
        ("down.0.conv1(x)", "down.0.conv1(x", "is out of place"),
        ("outside mode 0", "traced graph", "cannot be read"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(recorded: TracedGraph, old: str, new: str, what: str) -> None:
    text = str(recorded).replace("float32[8, 3", "float32[3, 3")
    damaged = text.replace(old, new, 1)
    number = next(i for i, (a, b) in enumerate(zip(text.splitlines(), damaged.splitlines(), strict=True), 1) if a != b)
    with pytest.raises(InputError) as caught:
        parse_graph(damaged)
    assert what in str(caught.value)
    if "dtype" not in what:
        assert f"line {number}" in caught.value.where


def test_a_text_without_nodes_is_no_graph() -> None:
    with pytest.raises(InputError, match="holds no traced graph"):
        parse_graph("traced graph Net, training\n")


_TEXT = str(trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)))
_RUN = "setattr(__import__('builtins'), 'pipecompile_graph_ran', 1)"
_GUARDS = (
    *(
        repr(_RUN),
        f"lambdify('x', {_RUN!r})",
        f"sympify({_RUN!r})",
        "9**9**9**9",
        "10**10**8",
        "2**(9**9)",
        "factorial(10**9)",
    ),
    *(
        "prime(10**12)",
        "(" * 300 + "1" + ")" * 300,
        "-" * 100_000 + "1",
        "1" + "+1" * 20_000,
        "9" * 100_000,
        "f(x)(y)",
    ),
)
_LINES = {
    "input_1 = placeholder input()": (f"input_1 = placeholder 'input={_RUN.replace(chr(39), chr(34))}'()",),
    "_1 = call_module 1(": (
        f"_1 = call_module '1\" or {_RUN.replace(chr(39), chr(34))} or \"'(",
        f"_1 = call_method 'relu() or {_RUN.replace(chr(39), chr(34))} or x.relu'(",
        "_1 = call_module nosuch(",
        "_1 = call_module 1(**{'a b': 1}, *",
        "_1 = evil_op 1(",
    ),
    "takes ": ("takes " + "(" * 100_000 + "leaf" + ",)" * 100_000, "takes " + "(" * 80 + "leaf" + ",)" * 80),
    "float32[4, 4]": ("float32[999999999999999999999999, 4]", "float32[-3]", "load[3]", "float32" + "[1]" * 50_000),
    "'weight'": ("'weight.x.'", "'__class__'", "'forward'", "''"),
    "memory 0": ("memory " + "9" * 5000,),
    "mode 0:": ("mode 99999:",),
    "device cpu": ("device evil",),
}


@pytest.mark.parametrize("guard", _GUARDS, ids=lambda text: text[:20])
def test_a_hostile_guard_is_refused_within_a_second_and_runs_nothing(guard: str) -> None:
    _refused(_TEXT.replace("takes", f"guard {guard} > 1\ntakes", 1))


@pytest.mark.parametrize(
    ("old", "new"), [(old, new) for old, news in _LINES.items() for new in news], ids=lambda t: t[:20]
)
def test_a_hostile_line_is_refused_within_a_second_and_runs_nothing(old: str, new: str) -> None:
    assert old in _TEXT
    _refused(_TEXT.replace(old, new, 1))


def _refused(text: str) -> None:
    def refused() -> None:
        with pytest.raises(InputError):
            parse_graph(text)

    assert_within(1.0, refused)
    assert not hasattr(builtins, "pipecompile_graph_ran")


@pytest.mark.parametrize("call", ["builtins.exec('1', ", "torch.load('x', ", "builtins.open('x', "])
def test_a_function_that_runs_code_or_files_is_a_name_only(call: str) -> None:
    parsed = parse_graph(_TEXT.replace("call_module 1(", f"call_function {call}"))
    assert any(isinstance(node.target, Named) for node in parsed.graph.nodes)
