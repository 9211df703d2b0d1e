"""Losses that the model has computed, and that a loss function only chooses, scales or adds: their divisor is found in the model.

loss_fn=lambda o: o["loss"]      cross_entropy(logits, labels) in the model: labels that count
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.driver.loss_analysis import UNKNOWN, WITHOUT_DIVISOR, LossAnalysis
from pipecompile.driver.specialization import Specialization
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_counts import loss_count
from pipecompile.graph.loss_divisors import divisor_of, meeting_before
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.loss_sources import LossSources, loss_sources
from pipecompile.graph.whole_batch import meeting_line
from pipecompile.tracing.node_facts import value_of

__all__ = ["analyse_numbers"]


def analyse_numbers(
    specialization: Specialization, outputs: LossOutputs, flow: BatchFlow, loss: Any, batch: MiniBatch
) -> LossAnalysis | None:
    """Return what is known of a loss that is a sum of numbers which the model has computed; None for another loss.

    `flow` is that of the graph of the loss function, whose inputs are the tensors of `outputs`.
    """
    sources = loss_sources(flow, loss) if isinstance(loss, fx.Node) else None
    if sources is None or not sources.nodes or flow.rule(loss).kind in WITHOUT_DIVISOR:
        return None
    terms = _terms(specialization, outputs, flow, sources)
    if not terms:
        return None
    count = partial(loss_count, specialization.graph, *terms)
    if specialization.facts.batch_size is not None or batch.whole.lists:
        return LossAnalysis(None, UNKNOWN, count)
    divisor = divisor_of(specialization.flow, *terms, has_constant=sources.has_constant)
    if divisor is None:
        line = next(filter(None, (meeting_line(specialization.flow, term) for term in terms)), "")
        return LossAnalysis(None, UNKNOWN, count, line)
    return LossAnalysis(divisor, flow.rule(loss), count, meeting_before(specialization.flow, *terms))


def _terms(
    specialization: Specialization, outputs: LossOutputs, flow: BatchFlow, sources: LossSources
) -> list[fx.Node]:
    """Return the values of the model that are the sources of a loss; none if one is of the target, or no tensor of the graph."""
    inputs = flow.graph.graph.find_nodes(op="placeholder")
    places = [inputs.index(node) for node in sources.nodes]
    if max(places) >= len(outputs.places):
        return []
    arguments: Any = specialization.graph.graph.output_node().args[0]
    terms = [arguments[outputs.places[place]] for place in places]
    is_known = all(isinstance(term, fx.Node) and isinstance(value_of(term), torch.Tensor) for term in terms)
    return terms if is_known else []
