"""The check of a new recording at its first run: one micro-batch by the recording, and by the model itself.

    new code                      checked at its first run
    new sizes of known code       checked the first three times
    check="every:N"               checked again after every N mini-batches

`verifiers.recording` compares. A recording is not checked where the model cannot run as a whole in this process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.containers import copied, with_tensors
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import RecordingWarning
from pipecompile.graph.device_placement import follow_device
from pipecompile.ir import TARGET
from pipecompile.options import Options
from pipecompile.parameters.meta_init import is_on_meta
from pipecompile.runtime.results import own_loss
from pipecompile.torch_private.fx_graphs import codegen_of
from pipecompile.torch_private.storages import is_traceable_wrapper_subclass
from pipecompile.tracing.guards.state_guards import StateGuards
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.reachable_code import searches_kept
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import warn
from pipecompile.verifiers.eager_run import CheckedCall
from pipecompile.verifiers.recording import Verdict, verify_recording

__all__ = ["RecordingChecks", "obstacle"]

_OTHER_SIZES = 3
"""Recordings of the same code for other sizes that are checked: sizes alone rarely change what is computed."""


class RecordingChecks:
    """The checks of one pipeline.

    `obstacle` is the reason why the model cannot run as a whole; "" if it can. `warn_of` gets a difference that may be rounding.
    """

    def __init__(self, model: nn.Module, obstacle: str, warn_of: Callable[[str], None]) -> None:
        self.model, self.obstacle, self.warn_of = model, obstacle, warn_of
        self._seen: Counter[int] = Counter()

    def register(self, specialization: Specialization) -> None:
        """Note when a new recording is to be checked: at once, or never, with the reason."""
        options = specialization.options
        code = _code_of(specialization.graph)
        reason = "check=False" if not options.check else self.obstacle or _spread(self.model, specialization)
        if not reason and self._seen[code] > _OTHER_SIZES:
            reason = "sizes alone are new"
        self._seen[code] += not reason
        specialization.checked = f"no: {reason}" if reason else "not yet"
        specialization.check_at = (math.inf, math.inf) if reason else (0, 0)

    def run(
        self, specialization: Specialization, batch: MiniBatch, arrivals: Mapping[tuple[str, bool], Any] | None
    ) -> None:
        """Check the first micro-batch, and note when the next check is due. Raise MismatchError.

        `arrivals` are those of a step, whose loss is compared, too; None for a call.
        """
        start, options = perf_counter(), specialization.options
        device = specialization.stage_devices[0]
        targets = tuple(parts[0] for (name, _), parts in (arrivals or {}).items() if name == TARGET)
        targets = with_tensors(targets, lambda tensor: tensor.to(device))

        def loss_of(output: Any) -> torch.Tensor | None:
            return _loss(options, output, targets) if arrivals else None

        call = CheckedCall(
            self.model, batch.first, device, torch.is_grad_enabled(), loss_of, options.loss_fn if arrivals else None
        )
        try:
            with searches_kept():
                verdict = verify_recording(_on(specialization.graph, device), call)
        except torch.OutOfMemoryError:
            verdict = Verdict(obstacle="the model and the recording do not fit into memory one after the other")
        if verdict.doubt:
            self.warn_of(verdict.doubt)
        self._warn_of_writes(specialization.guards)
        specialization.checked = f"no: {verdict.obstacle}" if verdict.obstacle else f"{perf_counter() - start:.2f} s"
        due = specialization.calls + options.check_period
        specialization.check_at = due, (due if call.with_grad else specialization.check_at[1])

    def _warn_of_writes(self, guards: StateGuards | None) -> None:
        """Warn if the model itself, when it ran for the check, has changed what guards see: no node of the recording does so.

        Numbers get their values from before the check back.
        """
        if guards is None or guards.hold():
            return
        changes, holders = guards.changes(), guards.holders()
        for change in changes:
            if (holder := holders.get(change.label)) is not None and isinstance(change.before, (int, float)):
                holder.put(change.before)
        names = ", ".join(change.label for change in changes)
        warn(
            f"{type(self.model).__name__}.forward changes {names}, which no recording can: a pipeline leaves it as it is. Try an attribute or"
            " a buffer of the model instead",
            RecordingWarning,
        )


def _loss(options: Options, output: Any, targets: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the loss of a step, None if it is not a scalar: the step itself refuses that."""
    if options.loss_fn is None:
        own: torch.Tensor | None = own_loss(output)
        return own
    loss = options.loss_fn(output, *map(copied, targets))
    if options.has_aux and isinstance(loss, tuple):
        loss = loss[0]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _spread(model: nn.Module, specialization: Specialization) -> str:
    """Return why the model cannot run as a whole where its stages are; "" if it can."""
    tensors = [*model.parameters(), *model.buffers()]
    if len({*specialization.stage_devices, *(tensor.device for tensor in tensors)}) > 1:
        return "stages on several devices"
    return "tensors of another kind" if any(map(is_traceable_wrapper_subclass, tensors)) else ""


def _code_of(graph: TracedGraph) -> int:
    """Return a key of the calls of a recording, whatever their sizes."""
    return hash(
        tuple((node.op, str(node.target), facts(node).module, facts(node).source) for node in graph.graph.nodes)
    )


def _on(graph: TracedGraph, device: torch.device) -> TracedGraph:
    """Return the recording, or if it was made on another device, a copy of it for this one."""
    copy = fx.Graph()
    if graph.facts.device.type == device.type:
        return graph
    copy.output(copy.graph_copy(graph.graph, {}))
    copy.set_codegen(codegen_of(graph.graph))
    return TracedGraph(graph, follow_device(copy, graph.facts.device, device), graph.facts)


def obstacle(model: nn.Module, *, holds_model: bool) -> str:
    """Return why the model cannot run as a whole in this process; "" if it can."""
    if not holds_model:
        return "the model is not whole on a rank"
    return "the model was on meta" if is_on_meta(model) else ""
