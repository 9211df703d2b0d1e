"""The share of each micro-batch in the mini-batch's loss: of its samples, or of what the loss counts (loss_divisors.py).

    labels that count   3, 1, 0 of 4      cross_entropy divides by 4     shares 3/4, 1/4, 0

A loss function is recorded once per kind of call, on outputs of the recorded sizes, to find what it divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import PipecompileError
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_divisors import divisor_of
from pipecompile.ir import TARGET
from pipecompile.options import Options
from pipecompile.runtime.results import own_loss
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.recording import record
from pipecompile.tracing.state.snapshot import contents_restored, places_of

__all__ = ["find_divisor"]

Arrivals = Mapping[tuple[str, bool], Any]


_OF_TARGET = "target"


def find_divisor(
    specialization: Specialization, target: Any, arrivals: Arrivals, options: Options, warnings: WarningsOnce
) -> LossDivisor | None:
    """Return the divisor of the loss of a step; None if shares are those of samples. Warn if neither is right.

    `target` is that of the mini-batch; `arrivals` have the micro-batches of the inputs and of the target.
    """
    divisor, rule = _divisor(specialization, target, arrivals, options)
    if rule.kind is MergeKind.ADDED:
        warnings.summed()
    elif rule.kind is not MergeKind.AVERAGED and divisor is None:
        warnings.undivided_loss()
    return divisor


_MEAN = MergeRule(MergeKind.AVERAGED)

Finding = tuple[LossDivisor | None, MergeRule]
"""The divisor of a loss if it has one, and the rule by which losses of micro-batches merge; a mean if that is not known."""


def _divisor(specialization: Specialization, target: Any, arrivals: Arrivals, options: Options) -> Finding:
    if specialization.facts.batch_size is not None:
        return None, _MEAN
    if options.loss_fn is None:
        loss = own_loss(specialization.outputs.example)
        node = specialization.graph.graph.output_node()
        pairs: Any = zip(node.args[0], value_of(node), strict=True)  # type: ignore[arg-type]
        argument = next((a for a, value in pairs if value is loss), None)
        return _found(specialization.flow, argument)
    if target is None or options.batch_dims:
        return None, _MEAN
    return _of_function(options.loss_fn, specialization, arrivals[TARGET, False][0], has_aux=options.has_aux)


def _found(flow: BatchFlow, loss: Any) -> Finding:
    if not isinstance(loss, fx.Node) or flow.guessed:
        return None, _MEAN
    return divisor_of(flow, loss), flow.rule(loss)


class _LossCall(nn.Module):
    """The call of a loss function as a model, with the loss as its output."""

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool) -> None:
        super().__init__()
        self.loss_fn, self.has_aux = loss_fn, has_aux

    def forward(self, output: Any, target: Any) -> Any:
        result = self.loss_fn(output, target)
        return result[0] if self.has_aux else result


def _of_function(loss_fn: Callable[..., Any], specialization: Specialization, target: Any, *, has_aux: bool) -> Finding:
    """Return the divisor of a loss function, if it depends on the target alone."""
    size = specialization.graph.facts.symbol
    samples = next(
        (leaf.shape[0] for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0
    )

    def example(value: torch.Tensor) -> torch.Tensor:
        shape = [int(n.node.expr.subs({size: samples})) if isinstance(n, torch.SymInt) else n for n in value.shape]
        return torch.zeros(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)

    call = _LossCall(loss_fn, has_aux)
    try:
        output = pytree.tree_map_only(torch.Tensor, example, specialization.outputs.example)
        inputs = flatten(call.forward, (output, target), {})
        with contents_restored(places_of(loss_fn)):
            graph = record(call, inputs, torch.device("cpu"))
    except (PipecompileError, TypeError, ValueError):
        return None, _MEAN  # what cannot be recorded is weighted by samples
    results: Any = graph.graph.output_node().args[0]
    divisor, rule = _found(BatchFlow(graph), results[0] if len(results) == 1 else None)
    if divisor is None:
        return None, rule
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    first = len(placeholders) - len(pytree.tree_leaves(target))
    places = [placeholders.index(name) - first for name in divisor.inputs]
    return (divisor.renamed([f"{_OF_TARGET}:{p}" for p in places]) if min(places) >= 0 else None), rule
