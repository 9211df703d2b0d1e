"""Read a traced graph from its text: `parse_graph(str(graph)) == graph`. The grammar is in `graph_text`.

A parsed graph can be compared, printed, verified, prepared (its ties computed) and cut: `routes`, `split` and `Cut` need only what the text
has. It cannot run, and its nodes cannot be measured: parameters and buffers are on `meta`, a module is a ModuleStub, and a function
outside torch, pipecompile and Python's operators is a Named. Its input and output structures have a Named for classes other than tuple,
list and dict. Ties that are computed from a parsed graph are those of the recorded graph.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pipecompile.errors import InputError, PipecompileError, TraceError
from pipecompile.text.input_checks import without_mark
from pipecompile.text.shown_value import shown
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.graph_facts import GraphFacts, Ties
from pipecompile.tracing.graph_text import ModuleStub
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.node_facts import NodeFacts, Role, set_facts
from pipecompile.tracing.opaque.attempts import OpaqueReason
from pipecompile.tracing.outlining.code_blocks import CodeBlock
from pipecompile.tracing.qualified_names import Named, resolved
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.value_parser import ValueReader, literal, structure_of

__all__ = ["parse_graph"]

_TITLE = re.compile(r"traced graph (.+), (training|evaluation)")
_MODE = re.compile(r"mode (\d+): grad (on|off), nesting (\d+)(.*)")
_KIND = re.compile(r", (\w+) (\w+) (cached|uncached)")
_KERNEL = re.compile(r", kernel (\w+) (\w+)")
_NODE = re.compile(r"(\w+) = (\w+) ([\w.<>]+|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(\(.*\))")
_ROLES = {role.value: role for role in Role}


@dataclass(slots=True)
class _Header:
    """The values of the header lines."""

    name: str = ""
    training: bool = True
    batch: str = ""
    examples: dict[str, int] = field(default_factory=dict)
    only: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grad_mode: bool | None = None
    modes: dict[int, Ambient] = field(default_factory=dict)
    regions: dict[int, RecomputedRegion] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    dims: list[Any] = field(default_factory=list)
    takes: str = "leaf"
    gives: str = "leaf"
    guards: list[str] = field(default_factory=list)
    kept: list[OpaqueReason] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    precedence: list[tuple[str, str]] = field(default_factory=list)
    prepared: bool = True


def parse_graph(text: str) -> TracedGraph:
    """Return the graph of a text. Raises InputError naming the line that cannot be read."""
    header, reader, graph = _Header(), None, None
    nodes: dict[str, fx.Node] = {}
    for number, line in enumerate(without_mark(text).split("\n"), 1):
        try:
            if not line.strip():
                continue
            call, *fields = line.split(" | ")
            if match := _NODE.fullmatch(call):
                reader = reader or ValueReader(header.device, header.examples)
                graph = graph or fx.Graph()
                nodes[match[1]] = _node(graph, match, fields, nodes, reader, header)
            elif graph is None:
                _header_line(header, line)
            else:
                raise InputError(f"{line!r} is out of place", why="the nodes have begun")
        except Exception as error:  # a text may fail anywhere in torch and sympy
            raise _unreadable(error, f"line {number}", line) from error
    if reader is None or graph is None:
        raise InputError("the text holds no traced graph", why="it has no node lines")
    try:
        return _assembled(header, reader, graph)
    except Exception as error:
        raise _unreadable(error, "header", header.name) from error


def _unreadable(error: Exception, where: str, text: str) -> InputError:
    what = error.what if isinstance(error, PipecompileError) else f"{shown(text)} cannot be read"
    return InputError(what, where=where, why=shown(str(error)))


def _refuse_run(*_: Any) -> None:
    raise InputError("a graph that was read from its text cannot run", hint="pc.trace the model again")


# -- header ---------------------------------------------------------------------------------------------------------


def _header_line(header: _Header, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "opaque" or line.startswith("opaque("):
        header.kept.append(_reason(line))
    elif word == "traced":
        title = _TITLE.fullmatch(line)
        if title is None:
            raise InputError(f"{line!r} cannot be read", why="expected 'traced graph NAME, training'")
        header.name, header.training = _text(title[1]), title[2] == "training"
    elif word == "mode":
        _mode(header, line)
    elif word == "region":
        _region(header, rest)
    elif word in ("batch", "symbol"):
        name, _, example = rest.partition(" = ")
        header.batch = name if word == "batch" else header.batch
        if example:
            header.examples[name] = int(example)
    elif word in _SETTERS:
        _SETTERS[word](header, rest)
    elif line != "outside mode 0":
        raise InputError(f"{line!r} is not a line of a header")


def _input(header: _Header, rest: str) -> None:
    name, _, dim = rest.rpartition(": ")
    header.names.append(_text(name))
    header.dims.append({"shared": None, "list": list}[dim] if dim in ("shared", "list") else int(dim))


def _module(header: _Header, rest: str) -> None:
    name, _, body = rest.partition(" = ")
    header.modules[_text(name)] = body


def _before(header: _Header, rest: str) -> None:
    a, b = rest.split()
    header.precedence.append((a, b))


_SETTERS: dict[str, Any] = {
    "only": lambda header, rest: setattr(header, "only", int(rest)),
    "device": lambda header, rest: setattr(header, "device", torch.device(rest)),
    "gradients": lambda header, rest: setattr(header, "grad_mode", {"any": None, "on": True, "off": False}[rest]),
    "takes": lambda header, rest: setattr(header, "takes", rest),
    "gives": lambda header, rest: setattr(header, "gives", rest),
    "guard": lambda header, rest: header.guards.append(rest),
    "tie": lambda header, rest: header.groups.append(tuple(rest.split())),
    "ties": lambda header, _rest: setattr(header, "prepared", False),
    "input": _input, "module": _module, "before": _before,
}  # fmt: skip


def _mode(header: _Header, line: str) -> None:
    match = _MODE.fullmatch(line)
    if match is None:
        raise InputError(f"{line!r} cannot be read", why="expected 'mode 0: grad on, nesting 0, cpu off cached'")
    kinds = [
        (kind, None if dtype == "off" else dtype, cached == "cached") for kind, dtype, cached in _KIND.findall(match[4])
    ]
    kernels = [(name, {"True": True, "False": False}.get(value, value)) for name, value in _KERNEL.findall(match[4])]
    header.modes[int(match[1])] = Ambient(match[2] == "on", tuple(kinds), int(match[3]), tuple(kernels))


def _region(header: _Header, rest: str) -> None:
    number, _, written = rest.partition(": ")
    values, _, place = written.partition(" | ")
    parent, mode, options = ValueReader(header.device, header.examples).read(literal(values))
    around, source = header.regions.get(parent), _text(place) if place else ""
    region = RecomputedRegion(around, header.modes[mode], header.modes[0], tuple(options.items()), source)
    header.regions[int(number)] = region


def _reason(line: str) -> OpaqueReason:
    call = literal(line)
    assert isinstance(call, ast.Call)
    path, method, place, function, block, code, what, where = map(ast.literal_eval, call.args)
    piece = Piece(path, method, place, function, CodeBlock.parse(block) if block else None)
    return OpaqueReason(piece, TraceError(what, code=code, where=where))


def _text(written: str) -> str:
    """Return a field as it was before it was written."""
    text: str = ast.literal_eval(written) if written[:1] in ("'", '"') else written
    return text


# -- nodes ----------------------------------------------------------------------------------------------------------


def _node(
    graph: fx.Graph,
    match: re.Match[str],
    fields: list[str],
    nodes: dict[str, fx.Node],
    reader: ValueReader,
    header: _Header,
) -> fx.Node:
    name, op, target = match[1], match[2], _text(match[3])
    call = literal(f"_{match[4]}")
    assert isinstance(call, ast.Call)
    args = tuple(reader.read(argument, nodes) for argument in call.args)
    kwargs = {str(keyword.arg): reader.read(keyword.value, nodes) for keyword in call.keywords}
    function = resolved(target) if op == "call_function" else target
    node = graph.create_node(op, function, args, kwargs, name=name)
    set_facts(node, _facts(fields[1:], header), reader.read(literal(fields[0])))
    return node


def _facts(fields: list[str], header: _Header) -> NodeFacts:
    noted: dict[str, Any] = {}
    for written in fields:
        word, _, rest = written.partition(" ")
        if word == "in":
            noted["module"] = _text(rest)
        elif word == "at":
            noted["source"] = _text(rest)
        elif word == "mode":
            noted["ambient"] = header.modes[int(rest)]
        elif word == "region":
            noted["region"] = header.regions[int(rest)]
        elif word in _MEMORY:
            noted[_MEMORY[word]] = frozenset(map(int, rest.split()))
        elif word in ("draws", "seeds"):
            noted[word] = True
        else:
            noted["role"] = _ROLES[word]
    return NodeFacts(**noted)


_MEMORY = {"memory": "storages", "writes": "mutates", "reads": "reads"}


def _assembled(header: _Header, reader: ValueReader, graph: fx.Graph) -> TracedGraph:
    noted = GraphFacts(
        symbol=reader.symbol(header.batch), batch_size=header.only,
        guards=tuple(_guard(line, reader, header.batch) for line in header.guards),
        names=tuple(header.names), dims=tuple(header.dims),
        in_spec=structure_of(literal(header.takes), reader), out_spec=structure_of(literal(header.gives), reader),
        outside=header.modes[0], device=header.device, kept=tuple(header.kept), grad_mode=header.grad_mode,
        ties=Ties(tuple(header.groups), tuple(header.precedence)) if header.prepared else None,
    )  # fmt: skip
    root: dict[str, Any] = {name: _stub(body, reader) for name, body in header.modules.items()}
    for node in graph.nodes:
        if node.op == "get_attr":
            root[str(node.target)] = _attribute(node)
    module = TracedGraph(root, graph, noted, header.name)
    module.training = header.training
    module.register_forward_pre_hook(_refuse_run)
    return module


def _guard(line: str, reader: ValueReader, batch: str) -> Guard:
    condition, _, place = line.partition(" | ")
    return Guard(reader.symbol(batch), reader.expression(literal(condition)), _text(place) if place else "")


def _stub(body: str, reader: ValueReader) -> ModuleStub:
    call = literal(body.replace("<", "_").replace(">", "_"))
    assert isinstance(call, ast.Call)
    kind = body.partition("(")[0]
    stub = ModuleStub(kind, ast.literal_eval(literal(body[len(kind) :]).elts[0]))  # type: ignore[attr-defined]
    for place, table in enumerate(call.args[1:]):
        assert isinstance(table, ast.Dict)
        for key, tree in zip(table.keys, table.values, strict=True):
            owner, name = _owner(stub, ast.literal_eval(key) if key is not None else "")
            tensor = reader.tensor(tree)
            blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if place == 0:
                owner.register_parameter(name, nn.Parameter(blank, requires_grad=tensor.requires_grad))
            else:
                owner.register_buffer(name, blank)
    return stub


def _owner(stub: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module inside a stub that holds a parameter, and the parameter's own name."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(stub.named_children()):
            stub.add_module(parent, nn.Module())
        stub = stub.get_submodule(parent)
    return stub, name


def _attribute(node: fx.Node) -> Any:
    """Return what stands for an attribute of the model: a tensor on meta, or a name."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, Named) else Named(repr(value))
    blank = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return nn.Parameter(blank) if value.requires_grad else blank
