"""The numbers of an output that a loss function only scales and adds: losses that the model has computed itself.

    lambda o: o["loss"]                        o["loss"]
    lambda o: 2 * o["loss"] + 0.1 * o["aux"]   o["loss"], o["aux"]
    lambda o, y: o["loss"] + mse(o["y"], y)    none: a term is of the loss function

What such a loss divides by is found in the graph of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_divisors import SUMS, is_scaling
from pipecompile.tracing.node_facts import value_of

__all__ = ["LossSources", "loss_sources"]

_SAME = (MergeRule(MergeKind.SAME),)


@dataclass(frozen=True, slots=True)
class LossSources:
    """Inputs of the graph of a loss function whose sum is the loss; with `has_constant` there are terms that no sample enters."""

    nodes: tuple[fx.Node, ...] = ()
    has_constant: bool = False


def loss_sources(flow: BatchFlow, loss: fx.Node) -> LossSources | None:
    """Return the numbers that a loss is a sum of; None if a term is computed otherwise from samples."""
    while is_scaling(loss):
        loss = loss.args[0]  # type: ignore[assignment]
    if loss.op == "placeholder":
        return LossSources((loss,)) if value_of(loss).dim() == 0 else None
    if flow.rules.get(loss) == _SAME:
        return LossSources(has_constant=True)
    if loss.target not in SUMS or loss.kwargs:
        return None
    found = [
        loss_sources(flow, term) if isinstance(term, fx.Node) else LossSources(has_constant=True)
        for term in loss.args[:2]
    ]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    return LossSources(tuple(node for one in known for node in one.nodes), any(one.has_constant for one in known))
