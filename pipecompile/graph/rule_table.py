"""The table of merge rules of a graph's values, and the calls between values with rules and another value.

    x ─► h ─► sort ─► y          x and h have rules, sort has none
              └─────┘            the region of y: its inputs are the values with rules that are read in it, here h

A region can be run by itself: on random values in an experiment, or behind the stages on the whole mini-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.gradient_paths import differentiated
from pipecompile.graph.merge_laws import has_unknown_size
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["MERGED", "RuleTable"]

MERGED = frozenset(MergeKind) - {MergeKind.COMPUTED, MergeKind.REFUSED, MergeKind.LISTED}
"""The kinds of rules that merge values of micro-batches exactly."""


class RuleTable:
    """The rules of the values of a graph so far.

    `rules` has one rule per leaf of a node's value, `seen` the nodes with rules in graph order, `of_size` the values that depend
    on the batch size and not on the samples.
    """

    def __init__(self, graph: TracedGraph) -> None:
        self.graph, self.symbol = graph, graph.facts.symbol
        self.rules: dict[fx.Node, tuple[MergeRule, ...]] = {}
        self.seen: list[fx.Node] = []
        self.of_size: set[fx.Node] = set()
        self._writers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._makers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._order = {node: place for place, node in enumerate(graph.graph.nodes)}

    def note(self, node: fx.Node, rules: Sequence[MergeRule]) -> None:
        """Give a node its rules."""
        self.rules[node] = tuple(rules)
        self.seen.append(node)
        for storage in facts(node).mutates:
            self._writers[storage].append(node)
        for storage in facts(node).storages if node.op not in ("get_attr", "placeholder") else ():
            self._makers[storage].append(node)

    def rule(self, node: fx.Node) -> MergeRule:
        """Return the rule of a node whose value is one tensor."""
        (rule,) = self.rules[node]
        return rule

    def is_merged(self, node: fx.Node) -> bool:
        """Return whether every leaf of a node's value has a rule that merges it."""
        return all(rule.kind in MERGED for rule in self.rules[node])

    def region_of(
        self, ends: Sequence[fx.Node], *, is_end_closed: bool = True, begins: Callable[[fx.Node], bool] | None = None
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the merged values that `ends` are computed from, and the calls between them and `ends`, which are included.

        Every call that makes or writes memory written in the region belongs to the region; with `is_end_closed` False, memory
        that only the `ends` write is an input. `begins` says behind which values a region may begin, by default `may_begin`.
        Linear in the region and in the calls that share memory with it.
        """
        begins = begins or self.may_begin
        inputs: set[fx.Node] = set()
        region: set[fx.Node] = set()
        shared: set[tuple[str, int]] = set()
        pending = list(ends)
        while pending:
            node = pending.pop()
            if node in region or facts(node).is_size or node.op == "get_attr":
                continue
            inputs.discard(node)
            region.add(node)
            sources = [
                s for s in node.all_input_nodes if not facts(s).is_size and s.op != "get_attr" and s not in region
            ]
            inputs |= {source for source in sources if begins(source)}
            pending += [source for source in sources if not begins(source)]
            if is_end_closed or node not in ends:
                pending += [one for one in self._touching(node, shared) if one not in region]
        return sorted(inputs, key=self._order.__getitem__), sorted(region, key=self._order.__getitem__)

    def region_of_gradient(self, call: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the merged values that a call of `autograd.grad` needs, and the calls between its inputs and itself, which is included.

        The region is empty if a value that it reads has no rule, or is not a tensor.
        """
        nodes = compute_nodes(self.graph)
        nodes = nodes[: nodes.index(call) + 1]
        reaching = {call}
        for node in reversed(nodes):
            reaching |= set(node.all_input_nodes) if node in reaching else set()
        leaves: set[fx.Node] = set()
        fx.node.map_arg(call.kwargs.get("inputs", call.args[1:2]), leaves.add)
        region = [node for node in differentiated(call, nodes) if node in reaching and node not in leaves]
        sources = {s for node in region for s in node.all_input_nodes if not facts(s).is_size and s.op != "get_attr"}
        inputs = sorted(sources - set(region), key=self._order.__getitem__)
        return (inputs, region) if all(map(self.may_begin, inputs)) else ([], [])

    def may_begin(self, node: fx.Node) -> bool:
        """Return whether a region may begin behind a node: an input, or a tensor with a rule whose sizes are known."""
        if node.op == "placeholder":
            return True
        value = value_of(node)
        is_tensor = isinstance(value, torch.Tensor) and node not in self.of_size
        return is_tensor and self.is_merged(node) and not has_unknown_size(value, self.symbol)

    def may_begin_sized(self, node: fx.Node) -> bool:
        """Return whether a region may begin behind a node, rows that depend on the batch size alone included.

        What holds for any rows holds for these. What holds for these alone, as for ones, needs their values.
        """
        is_rows = node in self.of_size and self.rules[node][0].kind is MergeKind.JOINED and self.is_merged(node)
        return self.may_begin(node) or (is_rows and not has_unknown_size(value_of(node), self.symbol))

    def may_begin_rows(self, node: fx.Node) -> bool:
        """Return whether a region that brings rows back in order may begin behind a node.

        Counts per expert and chosen experts belong together: drawn one by one they would contradict each other.
        """
        if node.op == "placeholder" or not self.may_begin(node):
            return node.op == "placeholder"
        is_rows = self.rule(node).kind in (MergeKind.JOINED, MergeKind.SAME)
        return is_rows and value_of(node).is_floating_point()

    def _touching(self, node: fx.Node, shared: set[tuple[str, int]]) -> Iterator[fx.Node]:
        """Yield the calls that make or write memory that this call writes, and those that write memory that it makes.

        `shared` has the memory whose calls have been yielded, which is left out.
        """
        held = {("writers", storage) for storage in facts(node).storages | facts(node).mutates}
        made = {("makers", storage) for storage in facts(node).mutates}
        for kind, storage in (held | made) - shared:
            calls = self._writers if kind == "writers" else self._makers
            yield from calls.get(storage, ())
        shared |= held | made
