"""Several batches one behind the other in one tensor, until they are divided again: two images through one encoder.

z = cat([x, y])      (2B, C)   2 blocks: micro-batches have these rows in another order, so no rule merges z
h = relu(z)          (2B, C)   2 blocks, since each row comes from the same row
a, b = h.chunk(2)    (B, C)    joined: rows of samples in their order

Rows of random numbers, of which no two depend on each other, are blocks as well, and joined: any row may be that of any sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_rows import RESHAPES, batch_dim_of, dims_along, kept_apart
from pipecompile.graph.row_order import rows_each, word_of
from pipecompile.tracing.node_facts import facts, leaves_of, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["StackedBatches"]

_COMPUTED = MergeRule(MergeKind.COMPUTED)
_DIVIDE = ("chunk", "split", "tensor_split")


class StackedBatches:
    """The values of a graph that have several blocks, each with the rows of all samples. `blocks` has their number."""

    def __init__(self, graph: TracedGraph) -> None:
        self.graph, self.symbol = graph, graph.facts.symbol
        self.blocks: dict[fx.Node, int] = {}

    def rules(self, node: fx.Node, known: Mapping[fx.Node, Sequence[MergeRule]]) -> list[MergeRule] | None:
        """Return the rules of the leaves of a call that makes, keeps or divides blocks; None for any other call.

        `known` has the rules of the values before.
        """
        sources = [one for one in node.all_input_nodes if not facts(one).is_size]
        is_cat = word_of(node) in ("cat", "concat", "concatenate")
        if is_cat and (rules := self._stacked(node, sources, known)) is not None:
            return rules
        stacked = [one for one in sources if one in self.blocks]
        if not stacked:
            return None
        others = [one for one in sources if one not in self.blocks]
        if len({self.blocks[one] for one in stacked}) > 1 or any(not _is_same(known.get(one)) for one in others):
            return None
        return self._divided(node, stacked[0]) or self._kept(node, stacked)

    def note_item(self, node: fx.Node, made: fx.Node) -> None:
        """Note the blocks of an item of a tuple whose tensors all have blocks."""
        if made in self.blocks:
            self.blocks[node] = self.blocks[made]

    def note_unrelated(self, node: fx.Node) -> None:
        """Note that no row of a random tensor depends on another: several per sample are as many blocks."""
        rows = self._rows(value_of(node))
        if rows is not None and rows > 1:
            self.blocks[node] = rows

    def note_kept(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Note the blocks of a call that computes each row from the same row of random tensors, and is joined as these are."""
        if self.blocks.keys() >= {*sources} and len({self.blocks[source] for source in sources}) == 1:
            self._kept(node, sources)

    def forget(self, written: fx.Node) -> None:
        """Forget the blocks of values that share memory with a value that another call has written."""
        storages = facts(written).storages
        self.blocks = {node: n for node, n in self.blocks.items() if not storages & facts(node).storages}

    # -- one call ---------------------------------------------------------------------------------------------------

    def _rows(self, value: Any) -> int | None:
        """Return the rows per sample in the one batch dimension of a tensor; None if there are none."""
        dim = batch_dim_of(value, self.symbol)
        return None if dim is None else rows_each(value.shape[dim].node.expr, self.symbol)

    def _stacked(
        self, node: fx.Node, sources: Sequence[fx.Node], known: Mapping[fx.Node, Sequence[MergeRule]]
    ) -> list[MergeRule] | None:
        """Return the rule of a tensor of several batches; None if the call puts other values behind each other."""
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        joined: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        whole, dim = value_of(node), batch_dim_of(value_of(node), self.symbol)
        if dim is None or joined % whole.dim() != dim or not all(one in sources for one in parts):
            return None
        counts = [self._blocks_of(one, dim, known) for one in parts]
        if 0 in counts or sum(counts) != self._rows(whole):
            return None
        self.blocks[node] = sum(counts)
        return [_COMPUTED]

    def _blocks_of(self, node: fx.Node, dim: int, known: Mapping[fx.Node, Sequence[MergeRule]]) -> int:
        """Return the number of blocks along `dim`: 1 for one row per sample in their order; 0 for any other value."""
        if node in self.blocks:
            return self.blocks[node]
        is_plain = known.get(node) == (MergeRule(MergeKind.JOINED, dim),) and self._rows(value_of(node)) == 1
        return int(is_plain)

    def _divided(self, node: fx.Node, source: fx.Node) -> list[MergeRule] | None:
        """Return the rules of the parts of a tensor with blocks, of which each is one block; None if they are none."""
        word, value, dim = word_of(node), value_of(source), batch_dim_of(value_of(source), self.symbol)
        leaves = leaves_of(node)
        if word in _DIVIDE and node.args[0] is source and dims_along(word, node, value.dim()) == {dim}:
            is_whole = all(self._rows(leaf) == 1 for leaf in leaves) and len(leaves) == self.blocks[source]
        elif word == "getitem" and dim == 0 and node.args[0] is source:
            index: Any = node.args[1][0] if isinstance(node.args[1], tuple) and node.args[1] else node.args[1]
            is_rest = not isinstance(node.args[1], tuple) or all(one == slice(None) for one in node.args[1][1:])
            is_whole = is_rest and self._rows(leaves[0]) == 1 and self._begins_a_block(index)
        else:
            return None
        return [MergeRule(MergeKind.JOINED, dim)] * len(leaves) if is_whole else None

    def _begins_a_block(self, index: Any) -> bool:
        """Return whether a slice begins with a block: at a multiple of the batch size."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            return False
        start: Any = value_of(index.start) if isinstance(index.start, fx.Node) else index.start or 0
        return (
            start == 0 if isinstance(start, int) else rows_each(sympy.sympify(start.node.expr), self.symbol) is not None
        )

    def _kept(self, node: fx.Node, stacked: Sequence[fx.Node]) -> list[MergeRule] | None:
        """Return the rules of a call that computes each row from the same row of tensors with blocks; None for any other call."""
        leaves, blocks = leaves_of(node), self.blocks[stacked[0]]
        if not all(self._rows(leaf) == blocks for leaf in leaves):
            return None
        if word_of(node) in RESHAPES:
            before, after = value_of(stacked[0]), leaves[0]
            first = [batch_dim_of(one, self.symbol) for one in (before, after)]
            is_kept = len(stacked) == 1 and first == [0, 0] and isinstance(before, torch.Tensor)
        else:
            is_kept = kept_apart(node, self.graph, stacked)
        if not is_kept:
            return None
        self.blocks[node] = blocks
        return [_COMPUTED] * len(leaves)


def _is_same(rules: Sequence[MergeRule] | None) -> bool:
    return rules is not None and all(rule.kind is MergeKind.SAME for rule in rules)
