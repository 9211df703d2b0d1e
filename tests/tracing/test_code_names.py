"""Names that come from a model's keys, a call or a file never become code: they are quoted, or refused."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import pipecompile as pc
from pipecompile.tracing import trace
from pipecompile.tracing.emit.call_description import (
    code_name,
    graph_path,
    is_code_atom,
    is_code_name,
    model_path,
    printable,
)
from pipecompile.tracing.graph_parser import parse_graph
from pipecompile.tracing.traced_graph import check_code_names

RAN = "pipecompile_test_code_ran"
KEYS = (
    f'x", setattr(__import__("builtins"), "{RAN}", 1)) or getattr(self, "last',
    *('a"b', "a'b", "a\nb", "a\r", "a\0", "\\", '"""', "# COUNTER: 3", "{x}", "a#b", "$x^$", "<script>alert(1)</script>", "[/red]"),
    *("class", "None", "self", "__class__x", "_quoted_a", "_of_model", "global_is_keyword", "\ufb01", "größe", "\ud800", "\u202e", "\U0001f600"),
    *("a b", "0", "a/b", "x" * 100_000),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_ran():
    yield
    ran = builtins.__dict__.pop(RAN, None)
    assert ran is None, "a name was run as code"


class Keyed(nn.Module):
    """A module, a parameter and a buffer under a key."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.first, self.last, self.held = key, nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.inner = nn.Module()
        setattr(self.inner, key, nn.Linear(4, 4))
        if "." not in key:
            self.held.register_parameter(key, nn.Parameter(torch.randn(4)))
            self.held.register_buffer(f"{key}b", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(self.inner, self.key)(self.first(x))
        for tensor in (*self.held._parameters.values(), *self.held._buffers.values()):
            x = x * tensor
        return self.last(x)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key[:20]))
def test_a_key_of_any_text_runs_nothing_and_computes_what_the_model_does(key: str, tmp_path) -> None:
    model, x = Keyed(key), torch.randn(4, 4)
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", loss_fn=torch.sum, example_args=(x,))
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
    assert str(pipe).encode()
    assert parse_graph(str(pipe.graph)) == pipe.graph
    pipe.plan.save(tmp_path / "plan.json")
    assert pc.Plan.load(tmp_path / "plan.json") == pipe.plan


@pytest.mark.parametrize("key", ["$x^$", "<script>alert(1)</script>", "\ud800", 'a"\n'], ids=ascii)
def test_a_key_of_any_text_is_drawn(key: str, tmp_path) -> None:
    model, x = Keyed(key), torch.randn(4, 4)
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", example_args=(x,))
    files = [path.read_text() for path in pipe.dump(tmp_path)]
    pages = (pipe._repr_html_(), pipe.report(tmp_path / "report.html").read_text())
    assert files
    assert not any("<script>alert" in page for page in pages)


def test_paths_of_different_names_differ_and_lead_back() -> None:
    names = [*KEYS, "a.b", 'a".b', "class.a", "_quoted_.a", "_5f_", "class._quoted_class", "graph", "a.global"]
    paths = [graph_path(name) for name in names]
    assert len(set(paths)) == len(names)
    assert [model_path(path) for path in paths] == names
    assert all(is_code_atom(atom) for path in paths for atom in path.split("."))


@pytest.mark.parametrize("name", ["class", "a b", "x=f()", "0", "", "\ufb01", 'a"', "\ud800"])
def test_a_name_for_code_is_a_name(name: str) -> None:
    assert not is_code_name(name)
    assert is_code_name(code_name(name))


class Called(nn.Module):
    """Passes what it was built with to a submodule that is kept whole."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.first, self.kept, self.args, self.keywords = nn.Linear(4, 4), Kept(), args, keywords

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(self.first(x), *self.args, **self.keywords)


class Kept(nn.Module):
    def forward(self, x: torch.Tensor, *args: Any, **_: Any) -> torch.Tensor:
        scale = 3.0 if [*args] in (["# COUNTER: 2"], [{"# COUNTER: 2": Colour.RED, Colour.RED: 1}]) else 2.0
        return x * (0.0 if float(x.sum()) > 1e9 else scale)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", ["# COUNTER: 2", {"# COUNTER: 2": Colour.RED, Colour.RED: 1}, Colour.RED, "\ud800\n\"'"]
)
def test_a_value_that_code_cannot_contain_reaches_the_call(value: Any) -> None:
    model, x = Called(value), torch.randn(3, 4)
    assert torch.equal(trace(model, x)(x), model(x))


@pytest.mark.parametrize("keyword", ["class", "a b", "x=1, y", "\ufb01"])
def test_a_keyword_that_is_no_name_is_refused(keyword: str) -> None:
    with pytest.raises(pc.TraceError, match="a keyword of a call is not a name"):
        trace(Called(**{keyword: 1}), torch.randn(3, 4))


@pytest.mark.parametrize("keyword", ["class", f"a': setattr(__import__('builtins'), '{RAN}', 1) or x, 'b"])
def test_a_keyword_of_the_model_that_is_no_name_is_refused(keyword: str) -> None:
    class Open(nn.Module):
        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return sum(inputs.values())

    with pytest.raises(pc.TraceError, match="PC109"):
        trace(Open(), **{keyword: torch.randn(3, 4)})


def _graph(op: str, target: Any, args: Callable[[fx.Node], tuple[Any, ...]], **keywords: Any) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(graph.create_node(op, target, args(node), keywords))
    return graph


@pytest.mark.parametrize(
    "op, target, args",
    [
        ("placeholder", "y=f()", lambda _: ()),
        ("call_module", 'a"', lambda x: (x,)),
        ("get_attr", "a\n", lambda _: ()),
        ("call_method", "relu() or f", lambda x: (x,)),
        ("call_function", getattr, lambda x: (x, "class")),
        ("call_function", torch.relu, lambda _: (Colour.RED,)),
        ("call_function", torch.relu, lambda x: ([x, {"a": "# COUNTER: 1"}],)),
        ("call_function", torch.relu, lambda x: (x, slice("# COUNTER: 1"))),
    ],
)
def test_a_graph_with_other_text_than_names_is_refused(op: str, target: Any, args: Any) -> None:
    with pytest.raises(pc.InputError, match="cannot be written into its code"):
        check_code_names(_graph(op, target, args))
    check_code_names(_graph("call_method", "relu", lambda x: (x,)))


@pytest.mark.parametrize(
    ("name", "text"), [("a\nb", "a\\nb"), ("\ud800", "\\ud800"), ("\x1b[31m", "\\x1b[31m"), ("größe", "größe")]
)
def test_a_name_for_a_line_has_no_control_characters(name: str, text: str) -> None:
    assert printable(name) == text
