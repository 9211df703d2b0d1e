"""The first level: one recorded forward of a model, as a torch.fx.GraphModule with typed facts, a text form and a verifier.

A TracedGraph is an ordinary GraphModule. Its placeholders are the flat leaves of the inputs, its parameters and submodules are
the model's own objects, and it takes and returns what the model does, at any batch size that its guards admit. What the later
levels need beyond torch.fx stands in `graph.facts` (GraphFacts) and, per node, in `node_facts.facts(node)` (NodeFacts).

    str(graph)                       one line per node; grammar in `graph_text`
    graph_parser.parse_graph(text)   the way back: parse_graph(str(graph)) == graph
    verifiers.traced_graph           what a legal traced graph is
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.fx_graphs import OpOverload
from pipecompile.tracing.emit.call_description import is_code_atom, is_code_name, is_code_text
from pipecompile.tracing.emit.region_graphs import install_regions
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.graph_text import graph_text
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.qualified_names import Named

__all__ = ["TracedGraph", "check_code_names"]

_FACTS = "pipecompile"


class TracedGraph(fx.GraphModule):
    """A recorded forward. All facts are under the one name `facts`, so that hardly any submodule of a model collides with them.

    Two traced graphs are equal if their texts are: values of parameters do not count. The hash is the object's own, as of any nn.Module.
    """

    def __init__(
        self, root: nn.Module | dict[str, Any], graph: fx.Graph, facts: GraphFacts, class_name: str = "TracedGraph"
    ) -> None:
        super().__init__(root, graph, class_name)
        self.meta[_FACTS] = facts

    def recompile(self) -> Any:
        """Write the code of the graph anew; the user's own checkpointed regions are recomputed in its backward."""
        check_code_names(self.graph)
        code = super().recompile()
        if has_regions(self.graph.nodes):
            install_regions(self)
        return code

    @property
    def facts(self) -> GraphFacts:
        """The facts of the recording."""
        noted: GraphFacts = self.meta[_FACTS]
        return noted

    @facts.setter
    def facts(self, noted: GraphFacts) -> None:
        self.meta[_FACTS] = noted

    def __str__(self) -> str:
        return graph_text(self, self.facts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TracedGraph):
            return NotImplemented
        return self is other or str(self) == str(other)

    __hash__ = fx.GraphModule.__hash__


# -- what generated code may contain ---------------------------------------------------------------------------------

_LEAVES = (
    *(fx.Node, Named, OpOverload, bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (list, tuple, torch.Size, fx.immutable_collections.immutable_list)
_TABLES = (dict, fx.immutable_collections.immutable_dict)


def check_code_names(graph: fx.Graph) -> None:
    """Raise InputError if the code of `graph` would contain other text than names and plain values. Linear in its size.

    fx writes the code of a graph module by pasting texts, and Python runs it:

        call_module  layers.a"b          getattr(self.layers, "a"b")         any code could follow the quote
        placeholder  x=f()               def forward(self, x=f()):           runs when the code is made
        an argument  "# COUNTER: 3"      fx takes the line for a mark of its own and drops it
    """
    for node in graph.nodes:
        if isinstance(node.target, str):
            is_path = node.op in ("call_module", "get_attr")
            atoms = node.target.split(".") if is_path else [node.target]
            _require(
                all(map(is_code_atom if is_path else is_code_name, atoms)), f"the target of {node.op}", node.target
            )
        for name in node.kwargs:
            _require(is_code_name(name), "a keyword", name)
        if node.target is getattr and type(name := node.args[1]) is str and name.isidentifier():
            _require(is_code_name(name), "an attribute", name)
        _check_values((*node.args, *node.kwargs.values()))


def _check_values(values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is str:
            _require(is_code_text(value), "a text", value)
        elif kind is slice:
            _check_values((value.start, value.stop, value.step))
        elif kind in _TABLES:
            _check_values(value)
            _check_values(value.values())
        elif kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            _check_values(value)
        else:
            _require(kind in _LEAVES, "a value", kind.__qualname__)


def _require(holds: bool, what: str, text: str) -> None:
    if not holds:
        raise InputError(
            f"{what} of a graph cannot be written into its code: {shown(text)}",
            why="the code of a graph has plain names and values only, so that nothing in a name can run",
            hint="rename it to letters, digits and underscores",
        )
