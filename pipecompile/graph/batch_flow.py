"""The flow of a batch through a graph: how each value of the mini-batch follows from those of the micro-batches.

    x                  JOINED 0     rows of samples, in their order
    h = relu(x)        JOINED 0
    m = h.mean(0)      AVERAGED     no rows, but merged exactly
    c = h - m          COMPUTED     every row depends on all samples: no rule merges micro-batches
    y = c.flip(0)      COMPUTED

Rules are derived call by call in the order of the graph. `batch_rows` knows calls that keep samples apart, `batch_probes` makes
experiments with all others. Where a call has no rule, because it takes a value that has none, the calls since the last values with
rules are tried together: a sum of rows that were divided by the batch size is a mean. A value written in place gets the rule that
it has after the write.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_probes import BatchProbes, Finding
from pipecompile.graph.batch_rows import batch_dim_of, kept_apart, makes_unrelated_elements, moves_rows, takes_sizes
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.merge_laws import has_unknown_size
from pipecompile.graph.probe_layers import KeptPiece
from pipecompile.graph.rule_table import MERGED, RuleTable
from pipecompile.graph.stacked_batches import StackedBatches
from pipecompile.tracing.emit.call_objects import remade
from pipecompile.tracing.node_facts import facts, leaves_of, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["BatchFlow", "MERGED"]

_SAME, _COMPUTED = MergeRule(MergeKind.SAME), MergeRule(MergeKind.COMPUTED)
_REGION, _SHORT_REGION = 80, 10
"""Calls that are tried together: without, and with a call among them that is known to mix samples; but the first number where
rows may come back in order. Mixtures of experts have 20 to 70 calls between rows that are sorted by expert and rows in order."""

_PIECE_TRIALS = 4
"""Draws of the inputs of a piece kept whole, which is the user's own code and may take long."""


class BatchFlow:
    """The rules of all values of a graph.

    `rules` has one rule per leaf of a node's value. `mixing` are the calls that are known to mix samples, in graph order; `guessed`
    those that could not be tried, whose rows are taken to stay apart because their number says so. `given` has the rules of
    inputs, by place, that are neither joined nor the same for all.
    """

    def __init__(self, graph: TracedGraph, given: Mapping[int, MergeRule] | None = None) -> None:
        self.graph, self.symbol = graph, graph.facts.symbol
        self.table = RuleTable(graph)
        self.rules = self.table.rules
        self.mixing: list[fx.Node] = []
        self.guessed: list[fx.Node] = []
        self._probes = BatchProbes(graph)
        self._adjacent: dict[fx.Node, bool] = {}
        self._stacked = StackedBatches(graph)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for place, (node, dim) in enumerate(zip(placeholders, graph.facts.dims, strict=True)):
            by_dim = MergeRule(MergeKind.JOINED, dim) if isinstance(dim, int) else _SAME
            self.table.note(node, [(given or {}).get(place, by_dim)])
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.table.note(node, [_SAME])
        for node in compute_nodes(graph):
            self._visit(node)

    def rule(self, node: fx.Node) -> MergeRule:
        """Return the rule of a node whose value is one tensor."""
        return self.table.rule(node)

    def region_of(self, ends: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the merged values that `ends` are computed from, and the calls between them and `ends`, which are included."""
        return self.table.region_of(ends)

    def guesses_before(self, ends: Iterable[Any]) -> list[fx.Node]:
        """Return the calls on the way to `ends` that could not be tried, and whose rows are taken to stay apart."""
        before = {end for end in ends if isinstance(end, fx.Node)}
        for node in reversed(self.table.seen):
            before |= set(node.all_input_nodes) if node in before else set()
        return [node for node in self.guessed if node in before]

    # -- one call ---------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        made = node.args[0] if node.target in (operator.getitem, getattr) else None
        if isinstance(made, fx.Node) and not isinstance(value_of(made), torch.Tensor) and made in self.rules:
            self.table.note(node, self._item(node, made))
            self._stacked.note_item(node, made)
            return
        leaves = leaves_of(node)
        written = self._written(node)
        if self._is_of_size(node):
            self.table.of_size.add(node)
        rules, targets = self._derived(node, len(leaves), written)
        self.table.note(node, rules)
        for target, rule in zip(written, targets, strict=True):
            self._rewrite(target, rule)
            if node not in self._stacked.blocks:
                self._stacked.forget(target)

    def _is_of_size(self, node: fx.Node) -> bool:
        """Return whether a value depends on the batch size, and not on the samples: it is computed anew for every size."""
        sources = [s for s in node.all_input_nodes if not facts(s).is_size]
        known = all(s in self.table.of_size or self.rules.get(s) == (_SAME,) for s in sources)
        return known and (len(sources) < len(node.all_input_nodes) or any(s in self.table.of_size for s in sources))

    def _item(self, node: fx.Node, made: fx.Node) -> Sequence[MergeRule]:
        """Return the rules of an item of a tuple: those of the same leaves."""
        leaves = leaves_of(made)
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        own = leaves_of(node)
        if all(id(leaf) in places for leaf in own):
            return [self.rules[made][places[id(leaf)]] for leaf in own]
        return [self.rules[made][0] if len(set(self.rules[made])) == 1 else _COMPUTED for _ in own]

    def _derived(
        self, node: fx.Node, leaves: int, written: Sequence[fx.Node]
    ) -> tuple[Sequence[MergeRule], Sequence[MergeRule]]:
        """Return the rules of a call's leaves, and of the tensors that it writes."""
        sources = [source for source in node.all_input_nodes if not facts(source).is_size]
        sized = len(sources) < len(node.all_input_nodes)
        merged = all(source in self.rules and self.table.is_merged(source) for source in sources)
        kinds = {rule.kind for source in sources if source in self.rules for rule in self.rules[source]}
        if merged and kinds <= {MergeKind.SAME} and not sized:
            return [_SAME] * leaves, [_SAME] * len(written)
        if merged and _registers_a_hook(node) and kinds - {MergeKind.JOINED} <= {MergeKind.SAME}:
            return [_SAME] * leaves, [self.rule(target) for target in written]
        batched = [
            source for source in sources if source in self.rules and self.rules[source][0].kind is MergeKind.JOINED
        ]
        is_plain = merged and kinds <= {MergeKind.SAME, MergeKind.JOINED} and (not sized or takes_sizes(node))
        if is_plain and kept_apart(node, self.graph, batched, self._adjacent):
            self._stacked.note_kept(node, batched)
            return self._by_shape(node), [self._rows_of(target) for target in written]
        if (stacked := self._stacked.rules(node, self.rules)) is not None:
            self.mixing += [node] if merged and not self._stacked.blocks.keys() >= {*sources} else []
            return stacked, [_COMPUTED] * len(written)
        return self._tried(node, leaves, written)

    def _tried(
        self, node: fx.Node, leaves: int, written: Sequence[fx.Node]
    ) -> tuple[Sequence[MergeRule], Sequence[MergeRule]]:
        """Return the rules that an experiment finds, with the call alone or with the calls before it that have none."""
        if self._is_opaque(node):
            return self._of_piece(node, written)
        if makes_unrelated_elements(node):
            self._stacked.note_unrelated(node)
            return self._by_shape(node), [self._rows_of(target) for target in written]
        outputs = [*((node, leaf) for leaf in range(leaves)), *((target, 0) for target in written)]
        rules = self._of_gradient(node, outputs) or self._behind_sized_rows(node, outputs)
        return (rules[:leaves], rules[leaves:]) if rules else self._tried_from_samples(node, leaves, written, outputs)

    def _of_gradient(self, node: fx.Node, outputs: Sequence[tuple[fx.Node, int]]) -> list[MergeRule]:
        """Return the rules of a call of `autograd.grad`, tried with all that it differentiates; none for other calls, and without proof."""
        inputs, region = self.table.region_of_gradient(node) if node.target is torch.autograd.grad else ([], [])
        found = self._findings(inputs, region, outputs, _REGION) if region else []
        rules = [one.rule for one in found if one.rule]
        return rules if len(rules) == len(outputs) else []

    def _behind_sized_rows(self, node: fx.Node, outputs: Sequence[tuple[fx.Node, int]]) -> list[MergeRule]:
        """Return the rules of a call that takes rows of the batch size alone, for any such rows; none if it takes none, or has none."""
        if not any(one in self.table.of_size for one in node.all_input_nodes):
            return []
        begins = self.table.may_begin_sized
        found = self._findings(
            *self.table.region_of([node], begins=begins, is_end_closed=False), outputs, _SHORT_REGION
        )
        rules = [one.rule for one in found if one.rule]
        return rules if len(rules) == len(outputs) else []

    def _tried_from_samples(
        self, node: fx.Node, leaves: int, written: Sequence[fx.Node], outputs: Sequence[tuple[fx.Node, int]]
    ) -> tuple[Sequence[MergeRule], Sequence[MergeRule]]:
        """Return the rules of a call, or of the calls behind the last values of the samples that have rules."""
        inputs, region = self.table.region_of([node], is_end_closed=False)
        is_mixed = any(one in self.mixing for one in region)
        found = self._findings(inputs, region, outputs, _SHORT_REGION if is_mixed else _REGION)
        if found and len(region) == 1 and not all(one.is_tested for one in found):
            return self._guess(node, written)
        if found and len(region) == 1 and any(one.rule is None for one in found) and self._takes_samples(inputs):
            self.mixing.append(node)
        may_restore = is_mixed and (moves_rows(node) or self._settles_sizes(node))
        if may_restore and not (found and all(one.rule for one in found)):
            begins = self.table.may_begin_rows
            found = self._findings(*self.table.region_of([node], begins=begins, is_end_closed=False), outputs, _REGION)
        rules = [one.rule or _COMPUTED for one in found] or [_COMPUTED] * len(outputs)
        return rules[:leaves], rules[leaves:]

    def _settles_sizes(self, node: fx.Node) -> bool:
        """Return whether a call takes a part of known sizes out of a value of which the data decide a size, as `h[-1]` of the states of layers."""
        sources = [value_of(source) for source in node.all_input_nodes]
        is_known = isinstance(own := value_of(node), torch.Tensor) and not has_unknown_size(own, self.symbol)
        return is_known and any(isinstance(one, torch.Tensor) and has_unknown_size(one, self.symbol) for one in sources)

    def _findings(
        self, inputs: Sequence[fx.Node], region: Sequence[fx.Node], outputs: Sequence[tuple[fx.Node, int]], most: int
    ) -> list[Finding]:
        """Return the laws of `outputs` by experiments with a region; none if it has more than `most` calls or cannot be drawn."""
        if len(region) > most or any(not isinstance(value_of(node), torch.Tensor) for node in inputs):
            return []
        return self._probes.laws(region, {source: self.rule(source) for source in inputs}, outputs)

    def _of_piece(self, node: fx.Node, written: Sequence[fx.Node]) -> tuple[Sequence[MergeRule], Sequence[MergeRule]]:
        """Return the rules of a piece kept whole: those that the sizes suggest, if the piece on random values does not object."""
        rules, targets = self._guess(node, written)
        sources = [source for source in node.all_input_nodes if not facts(source).is_size]
        if node not in self.guessed or not all(isinstance(value_of(source), torch.Tensor) for source in sources):
            return rules, targets
        places = [place for place, rule in enumerate(rules) if rule.kind is MergeKind.JOINED]
        inputs = {source: self.rule(source) for source in sources if source.op != "get_attr"}
        found = self._probes.laws([node], inputs, [(node, place) for place in places], _PIECE_TRIALS)
        if not all(one.is_tested for one in found):
            return rules, targets
        self.guessed.remove(node)
        laws = dict(zip(places, (one.rule or _COMPUTED for one in found), strict=True))
        if _COMPUTED in laws.values():
            self.mixing.append(node)
        return [laws.get(place, rule) for place, rule in enumerate(rules)], targets

    def _guess(self, node: fx.Node, written: Sequence[fx.Node]) -> tuple[Sequence[MergeRule], Sequence[MergeRule]]:
        """Return the rules that the sizes suggest; none for what is computed from values that no rule merges."""
        sources = [source for source in node.all_input_nodes if not facts(source).is_size]
        if not all(source in self.rules and self.table.is_merged(source) for source in sources):
            leaves = len(leaves_of(node))
            return [_COMPUTED] * leaves, [_COMPUTED] * len(written)
        rules = self._by_shape(node), [self._rows_of(target) for target in written]
        if any(rule.kind is MergeKind.JOINED for rule in (*rules[0], *rules[1])):
            self.guessed.append(node)
        return rules

    def _takes_samples(self, inputs: Iterable[fx.Node]) -> bool:
        return any(self.rule(source).kind is not MergeKind.SAME for source in inputs)

    def _is_opaque(self, node: fx.Node) -> bool:
        """Return whether a node is a piece of the user's own code, which is tried alone."""
        return node.op == "call_module" and isinstance(self._probes.layer(str(node.target)), KeptPiece)

    def _by_shape(self, node: fx.Node) -> list[MergeRule]:
        return [self._rows(leaf) for leaf in leaves_of(node)]

    def _rows(self, leaf: Any) -> MergeRule:
        if not isinstance(leaf, torch.Tensor):
            return _COMPUTED if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) else _SAME
        dim = batch_dim_of(leaf, self.symbol)
        return _COMPUTED if dim is None else MergeRule(MergeKind.JOINED, dim)

    def _rows_of(self, node: fx.Node) -> MergeRule:
        return self._rows(value_of(node))

    # -- values written in place --------------------------------------------------------------------------------------

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments whose memory a call writes; parameters and buffers are not counted."""
        written = facts(node).mutates
        return [s for s in node.all_input_nodes if s.op != "get_attr" and not facts(s).is_size and written & facts(s).storages
                and isinstance(value_of(s), torch.Tensor)][:1]  # fmt: skip

    def _rewrite(self, target: fx.Node, rule: MergeRule) -> None:
        """Give the written tensor its rule after the write, and all that share its memory theirs: unknown, if the rule changed."""
        storages = facts(target).storages
        for node in self.table.seen:
            if node.op == "get_attr" or not storages & facts(node).storages or node not in self.rules:
                continue
            if node is target or _is_alias(value_of(node), value_of(target)):
                self.rules[node] = (rule,)
            elif {rule.kind, *(one.kind for one in self.rules[node])} != {rule.kind} or rule.kind not in (
                MergeKind.SAME,
                MergeKind.JOINED,
            ):
                self.rules[node] = (_COMPUTED,) * len(self.rules[node])


def _is_alias(one: Any, other: Any) -> bool:
    """Return whether two fake tensors are the same part of the same memory."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return bool(
        one.dim() == other.dim()
        and all(map(operator.eq, map(str, one.shape), map(str, other.shape)))
        and list(map(str, one.stride())) == list(map(str, other.stride()))
        and str(one.storage_offset()) == str(other.storage_offset())
    )


def _registers_a_hook(node: fx.Node) -> bool:
    """Return whether a call registers a hook that holds nothing of the samples: it leaves the values as they are."""
    is_made = any(source.target is remade and not source.args[2] for source in node.all_input_nodes)
    return node.op == "call_method" and is_made
