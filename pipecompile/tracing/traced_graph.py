"""The first level: one recorded forward of a model, as a torch.fx.GraphModule with typed facts, a text form and a verifier.

A TracedGraph is an ordinary GraphModule. Its placeholders are the flat leaves of the inputs, its parameters and submodules are
the model's own objects, and it takes and returns what the model does, at any batch size that its guards admit. What the later
levels need beyond torch.fx stands in `graph.facts` (GraphFacts) and, per node, in `node_facts.facts(node)` (NodeFacts).

    str(graph)                       one line per node; grammar in `graph_text`
    graph_parser.parse_graph(text)   the way back: parse_graph(str(graph)) == graph
    verifiers.traced_graph           what a legal traced graph is
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from pipecompile.tracing.emit.region_graphs import install_regions
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.graph_text import graph_text
from pipecompile.tracing.node_facts import has_regions

__all__ = ["TracedGraph"]

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
