"""The text form of a traced graph: a header, then one line per node.

    traced graph MLP, training
    batch s77 = 3
    device cpu
    gradients any
    outside mode 0
    mode 0: grad on, nesting 0, cpu off cached
    input x: 0
    takes ((leaf,), {})
    gives leaf
    guard s77 > 1 | net.py:9 in MLP.forward
    module layers.0 = torch.nn.modules.linear.Linear('in_features=4, out_features=4, bias=True', {'weight': float32[4, 4].grad}, {})
    tie layers_0_relu layers_0_add
    before layers_0_relu layers_1

    x = placeholder x() | float32[s77, 4] | memory 0
    layers_0 = call_module layers.0(x) | float32[s77, 4] | mode 0 | memory 1 | reads 2 3 | at net.py:7 in MLP.forward

Header lines, in this order; an expression is in Python's syntax, values as below:

    traced graph NAME, training|evaluation
    batch SYMBOL [= EXAMPLE]                       the batch size, and the number of samples recorded
    symbol SYMBOL = EXAMPLE                        a size that the data decide
    only N                                         the one batch size that the graph is right for
    device DEVICE
    gradients any|on|off                           the grad mode that the graph is right for
    outside mode N                                 the mode around the recorded call
    mode N: grad on|off, nesting N{, KIND DTYPE|off cached|uncached}
    region N: (PARENT, MODE, OPTIONS) [| PLACE]    a call of torch.utils.checkpoint: the region around it or None, the
                                                   mode at the call, its keywords, and its line
    input NAME: DIM|shared|list                    per input leaf its batch dimension
    takes STRUCTURE, gives STRUCTURE               (args, kwargs) and the output, with `leaf` for each leaf
    guard EXPRESSION [| PLACE]                     a condition on the batch size, and the line that branched
    opaque(PATH, METHOD, LINE, CODE, WHAT, WHERE)  a piece of the model that is one opaque node, and why
    module PATH = CLASS(CONFIG, {PARAMETERS}, {BUFFERS})
    ties none                                      the graph is not prepared; else any number of
    tie NODE ...                                   nodes that share a stage
    before A B                                     stage(A) <= stage(B)

A node:  NAME = OPCODE TARGET(ARGUMENTS) | VALUE {| FIELD}, with the fields

    in PATH         module whose forward made the call          mode N          grad mode and autocast at the call
    memory N ...    memory that the value lives in              writes N ...    memory that the call writes in place
    reads N ...     memory of the parameters and buffers inside the called module
    draws, seeds    random numbers are drawn, the generator's state is set
    region N        the innermost region that the call was made in
    size, batch_size, switch      the role of a node that is not a value of the model
    at PLACE        line of the user's code, as file:line in function

ARGUMENTS are Python: names are nodes, `torch.float32`, `device('cpu')`, `slice(...)`. A VALUE is `float32[s77, 4]` for a tensor, then
`.on('cuda:0')` if it is not on the device of the recording and `.grad` for an input, parameter or attribute that requires a gradient;
an expression in the symbols for a symbolic number; else as in ARGUMENTS. Other objects are `named('their.qualified.Name')`, tuples of
all classes are tuples. Functions, classes and modules are qualified names. Memory is numbered in order of appearance. Strides are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.node_facts import NodeFacts, Role, facts, value_of
from pipecompile.tracing.qualified_names import Named, qualified
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.value_text import ValuePrinter, expression_text, field, quoted

__all__ = ["ModuleStub", "graph_text"]

_BARE_TARGET = re.compile(r"[\w.<>]+")


class ModuleStub(nn.Module):
    """A module of a graph that was read from its text: its class by name, its configuration, its parameters and buffers on meta."""

    def __init__(self, kind: str, config: str) -> None:
        super().__init__()
        self.kind, self.config = kind, config

    def extra_repr(self) -> str:
        return self.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: a text has no code."""
        Named(self.kind)(*args, **kwargs)


def graph_text(module: fx.GraphModule, noted: GraphFacts) -> str:
    """Return the text of a traced graph. Linear in the number of nodes."""
    return "\n".join(_GraphPrinter(module, noted).lines()) + "\n"


class _GraphPrinter:
    """Prints one graph; numbers its modes, its regions and its memory in order of appearance."""

    def __init__(self, module: fx.GraphModule, noted: GraphFacts) -> None:
        self.module, self.noted = module, noted
        self.nodes = list(module.graph.nodes)
        self.modes: dict[Ambient, int] = {noted.outside: 0}
        self.regions: dict[RecomputedRegion, int] = {}
        self.memory: dict[int, int] = {}
        self.values = ValuePrinter(noted.device)

    def lines(self) -> list[str]:
        for node in self.nodes:
            if (ambient := facts(node).ambient) is not None:
                self.modes.setdefault(ambient, len(self.modes))
            for region in noted.path if (noted := facts(node).region) else ():
                self.modes.setdefault(region.ambient, len(self.modes))
                self.regions.setdefault(region, len(self.regions))
        nodes = [self._node(node) for node in self.nodes]
        middle = [*self._inputs(), *self._conditions(), *self._modules(), *self._ties()]
        return [*self._head(), *middle, "", *nodes]

    # -- header ---------------------------------------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        noted, batch = self.noted, str(self.noted.symbol)
        yield f"traced graph {field(type(self.module).__name__)}, {'training' if self.module.training else 'evaluation'}"
        yield f"batch {batch} = {self.values.symbols[batch]}" if batch in self.values.symbols else f"batch {batch}"
        yield from (f"symbol {name} = {example}" for name, example in self.values.symbols.items() if name != batch)
        if noted.batch_size is not None:
            yield f"only {noted.batch_size}"
        yield f"device {noted.device}"
        yield f"gradients {'any' if noted.grad_mode is None else 'on' if noted.grad_mode else 'off'}"
        yield "outside mode 0"
        yield from (f"mode {number}: {_mode(ambient, noted.outside)}" for ambient, number in self.modes.items())
        yield from (f"region {number}: {self._region(region)}" for region, number in self.regions.items())

    def _region(self, region: RecomputedRegion) -> str:
        parent = self.regions[region.parent] if region.parent else None
        written = self.values.text((parent, self.modes[region.ambient], dict(region.options)))
        return f"{written} | {field(region.source)}" if region.source else written

    def _inputs(self) -> Iterator[str]:
        for name, dim in zip(self.noted.names, self.noted.dims, strict=True):
            yield f"input {field(name)}: {'shared' if dim is None else 'list' if dim is list else dim}"
        yield f"takes {self._structure(self.noted.in_spec)}"
        yield f"gives {self._structure(self.noted.out_spec)}"

    def _conditions(self) -> Iterator[str]:
        for guard in self.noted.guards:
            yield f"guard {expression_text(guard.condition)}" + (f" | {field(guard.place)}" if guard.place else "")
        for reason in self.noted.kept:
            piece, fault = reason.piece, reason.fault
            block = str(piece.block or "")
            words = (piece.path, piece.method, piece.line, piece.function, block, fault.code, fault.what, fault.where)
            yield f"opaque({', '.join(map(quoted, words))})"

    def _modules(self) -> Iterator[str]:
        for target in dict.fromkeys(str(node.target) for node in self.nodes if node.op == "call_module"):
            module = self.module.get_submodule(target)
            kind = module.kind if isinstance(module, ModuleStub) else qualified(type(module))
            parameters, buffers = (self._held(pairs) for pairs in (module.named_parameters(), module.named_buffers()))
            yield f"module {field(target)} = {kind}({quoted(module.extra_repr())}, {parameters}, {buffers})"

    def _held(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> str:
        return "{" + ", ".join(f"{name!r}: {self.values.tensor(tensor, grad=True)}" for name, tensor in pairs) + "}"

    def _ties(self) -> Iterator[str]:
        if self.noted.ties is None:
            yield "ties none"
            return
        yield from (f"tie {' '.join(group)}" for group in self.noted.ties.groups)
        yield from (f"before {a} {b}" for a, b in self.noted.ties.precedence)

    def _structure(self, spec: pytree.TreeSpec) -> str:
        if spec.type is None:
            return "leaf"
        inner = [self._structure(spec.child(index)) for index in range(spec.num_children)]
        if spec.type is tuple:
            return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
        if spec.type is list:
            return f"[{', '.join(inner)}]"
        if spec.type is dict:
            return f"{{{', '.join(f'{self.values.text(key)}: {text}' for key, text in zip(spec.context, inner, strict=True))}}}"
        return f"named({qualified(spec.type)!r})({', '.join([self.values.text(spec.context), *inner])})"

    # -- nodes ----------------------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> str:
        name = qualified(node.target) if node.op == "call_function" else str(node.target)
        target = name if _BARE_TARGET.fullmatch(name) else quoted(name)
        keywords = [f"{key}={self.values.text(item)}" for key, item in node.kwargs.items()]
        arguments = ", ".join([*map(self.values.text, node.args), *keywords])
        value = self._tensor_value(node) or self.values.text(value_of(node))
        return " | ".join([f"{node.name} = {node.op} {target}({arguments})", value, *self._fields(facts(node))])

    def _tensor_value(self, node: fx.Node) -> str:
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return ""
        return self.values.tensor(value, self.noted.device, grad=node.op in ("placeholder", "get_attr"))

    def _fields(self, noted: NodeFacts) -> Iterator[str]:
        if noted.module:
            yield f"in {field(noted.module)}"
        if noted.ambient is not None:
            yield f"mode {self.modes[noted.ambient]}"
        for word, keys in (("memory", noted.storages), ("writes", noted.mutates), ("reads", noted.reads)):
            if keys:
                yield f"{word} {' '.join(map(str, self._numbers(keys)))}"
        yield from (word for word, holds in (("draws", noted.draws), ("seeds", noted.seeds)) if holds)
        if noted.region is not None:
            yield f"region {self.regions[noted.region]}"
        if noted.role is not Role.VALUE:
            yield noted.role.value
        if noted.source:
            yield f"at {field(noted.source)}"

    def _numbers(self, keys: Iterable[int]) -> list[int]:
        return sorted(self.memory.setdefault(key, len(self.memory)) for key in sorted(keys))


def _mode(ambient: Ambient, outside: Ambient) -> str:
    kinds = [
        f", {kind} {dtype or 'off'} {'cached' if cached else 'uncached'}" for kind, dtype, cached in ambient.autocast
    ]
    kinds += [f", kernel {name} {value}" for name, value in ambient.kernels_beside(outside)]
    return f"grad {'on' if ambient.grad else 'off'}, nesting {ambient.nesting}{''.join(kinds)}"
