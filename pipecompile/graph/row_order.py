"""The order of rows in values with several rows per sample: adjacent per sample, or interleaved.

x.flatten(0, 1)        a a b b      adjacent: the values of micro-batches can be concatenated
torch.cat([x, x])      a b a b      interleaved: concatenation would give another order
"""

from __future__ import annotations

import operator
from functools import lru_cache

import sympy
import torch
from torch import fx

from pipecompile.tracing.fakes.batch_symbol import batch_dims_of, expression_of
from pipecompile.tracing.node_facts import value_of

__all__ = ["by_sample", "rows_each", "word_of"]

_RESHAPES = ("reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "contiguous")
_MOVES = (
    "flip",
    "roll",
    "index_select",
    "sort",
    "argsort",
    "msort",
    "gather",
    "take_along_dim",
    "scatter",
    "tile",
    "repeat",
)


@lru_cache(maxsize=4096)
def rows_each(size: sympy.Basic, symbol: sympy.Symbol) -> int | None:
    """Return the number of rows per sample in a dimension of this size; None if the number is not constant."""
    first = size.subs({symbol: 1})
    whole = bool(first.is_Integer) and all(size.subs({symbol: n}) == n * first for n in range(2, 10))
    return int(first) if whole and first > 0 else None


def by_sample(node: fx.Node, symbol: sympy.Symbol, known: dict[fx.Node, bool] | None = None) -> bool:
    """Return whether the rows of each sample are known to be adjacent in the one batch dimension of a node's value.

    `known` has the answers for other nodes of the graph, and gets new ones: a value on two ways is looked at once.
    """
    known = {} if known is None else known
    pending = [node]
    while pending:
        decided = _decided_by(pending[-1], symbol) if pending[-1] not in known else []
        unknown = [] if isinstance(decided, bool) else [source for source in decided if source not in known]
        pending += unknown
        if not unknown:
            last = pending.pop()
            answer = decided if isinstance(decided, bool) else all(known[source] for source in decided)
            known.setdefault(last, answer)
    return known[node]


def _decided_by(node: fx.Node, symbol: sympy.Symbol) -> bool | list[fx.Node]:
    """Return whether the rows are adjacent, or the values of which all must have adjacent rows."""
    ((dim, size),) = batch_dims_of(value_of(node), symbol)
    if rows_each(size, symbol) == 1:
        return True
    word, sources = word_of(node), _sources(node)
    single = [source for source in sources if len(batch_dims_of(value_of(source), symbol)) == 1]
    if word in _RESHAPES and single:
        return single[:1] if _is_kept(single[0], value_of(node), dim, symbol) else False
    if word == "repeat_interleave" and single:
        return single[:1]
    if word in _MOVES or _picks(node):
        return False
    return [source for source in single if batch_dims_of(value_of(source), symbol)[0][1] == size] or False


def word_of(node: fx.Node) -> str:
    """Return the name of the method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the tensors among the arguments; for an item of a tuple, those of the call that made the tuple."""
    made = node.args[0] if node.target is operator.getitem else None
    if isinstance(made, fx.Node) and not isinstance(value_of(made), torch.Tensor):
        return _sources(made)
    return [source for source in node.all_input_nodes if isinstance(value_of(source), torch.Tensor)]


def _picks(node: fx.Node) -> bool:
    """Return whether the node is x[index] with a tensor as the index."""
    return word_of(node) == "getitem" and len(_sources(node)) > 1


def _is_kept(source: fx.Node, value: torch.Tensor, dim: int, symbol: sympy.Symbol) -> bool:
    """Return whether a reshape keeps adjacent rows adjacent: the first merged dimension of a size other than 1 has the batch."""
    old, new = ([*map(expression_of, tensor.shape)] for tensor in (value_of(source), value))
    starts = [
        index for index in range(len(old)) if sympy.prod(old[:index]) == sympy.prod(new[:dim]) and old[index] != 1
    ]
    return bool(starts) and symbol in old[starts[0]].free_symbols
