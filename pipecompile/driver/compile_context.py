"""The inputs of a compilation: the request, the decisions of earlier compilations, and the state that a pipeline keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.driver.backend import Backend
from pipecompile.driver.call_lock import CallLock
from pipecompile.driver.changing_values import ChangingValues
from pipecompile.driver.rebound_buffers import ReboundBuffers
from pipecompile.driver.signature import Signature
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import PartitionWarning
from pipecompile.graph.cut_transfer import Cut, check_fingerprint, verify_exact_cut
from pipecompile.ir.plan import Plan
from pipecompile.ir.plan_figures import moved_stages
from pipecompile.options import Options
from pipecompile.parameters.meta_init import MetaInit
from pipecompile.parameters.placement import Homes
from pipecompile.partitioners import Problem
from pipecompile.planning.planner import Planned
from pipecompile.runtime.results import require_gradient
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, LiftedState
from pipecompile.tracing.guards.state_guards import ReadChange
from pipecompile.tracing.opaque.attempts import OpaqueReason
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import warn

__all__ = ["CompileContext", "Decision", "CompileRequest"]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A call to compile for. The first micro-batch of `batch` is recorded; `candidates` are the splits to compare.

    `lifted` are the numbers of the model that the recording reads at every run, `changes` those of the model since the recording before.
    """

    batch: MiniBatch
    candidates: tuple[MiniBatch, ...]
    signature: Signature
    lifted: LiftedState = NOTHING_LIFTED
    changes: tuple[ReadChange, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of micro-batches to compare."""
        return tuple(len(batch.sizes) for batch in self.candidates)

    @property
    def samples(self) -> int | None:
        """Samples in the micro-batch that is recorded."""
        return self.batch.first.samples


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan of the first specialization, which later ones keep. A plan without a cut comes from the user.

    `counts` is the number of micro-batches that was asked for, and the number into which the first mini-batch went.
    """

    plan: Plan | None = None
    problem: Problem | None = None
    cut: Cut | None = None
    counts: tuple[int, int] | None = None

    @property
    def is_given(self) -> bool:
        """Whether the plan comes from the user, and no graph has been cut by it yet."""
        return self.plan is not None and self.cut is None

    def expected_microbatches(self, options: Options) -> int:
        """Return into how many micro-batches the next step goes: fewer than asked for, as the first mini-batch, if that has fewer samples."""
        asked = options.default_microbatches
        is_open = isinstance(options.schedule, str) or callable(options.schedule)
        return min(self.counts) if is_open and self.counts is not None and self.counts[0] == asked else asked

    def on(self, graph: TracedGraph, samples: int | None, devices: Sequence[str]) -> Planned | None:
        """Return the plan on `devices` with its cut carried over to `graph`. Return None if the graph has to be cut.

        Raises PlanError or VerifyError if the user's plan is not a legal plan of this graph.
        """
        if self.plan is None:
            return None
        if self.cut is None:
            check_fingerprint(self.plan.graph, self.plan.fingerprint, graph)
            verify_exact_cut(self.plan.stage_of, graph, self.plan.n_stages)
            _warn_of_moved(self.plan)
            return Planned(self.plan.on(devices), None, samples)
        stage_of = self.cut.on(graph)
        return Planned(self.plan, None, samples, stage_of) if stage_of else None

    def after(self, planned: Planned, cut: Cut, counts: tuple[int, int] | None = None) -> Decision:
        """Return the decision for later specializations: this one, completed where it was open."""
        if self.plan is None:
            return Decision(planned.plan, planned.problem, cut, counts)
        return self if self.cut else replace(self, plan=planned.plan, cut=cut, counts=counts)


def _warn_of_moved(plan: Plan) -> None:
    if moved := moved_stages(plan):
        warn(
            f"stages {', '.join(map(str, moved))} of the plan have other operations than its figures are of"
            ": its seconds and bytes are of before the change. Try pin= or split_before= instead, which measure what they move",
            PartitionWarning,
        )


@dataclass(frozen=True, slots=True)
class CompileContext:
    """The state that a pipeline keeps between compilations: its model, the homes of tensors, the warnings already given, and
    which values of the model change. `kept` has the pieces that the last recording kept whole, in training and in evaluation.
    """

    model: nn.Module
    backend: Backend
    homes: Homes
    meta_init: MetaInit
    warnings: WarningsOnce
    changing: ChangingValues
    rebound: ReboundBuffers
    kept: dict[bool, tuple[OpaqueReason, ...]] = field(default_factory=dict)
    calls: CallLock = field(default_factory=CallLock)

    def check_losses(self, losses: Sequence[torch.Tensor], changed: Sequence[ReadChange], *, trains: bool) -> None:
        """Give the warnings that waited for the end of a step, and those of what it has `changed` of the state that the recording
        reads. Raise DetachedLossError if a step that trains has losses without a gradient.
        """
        self.warnings.give_delayed()
        self.warnings.outdated(changed)
        if trains and self.backend.holds_model:  # ranks without the last stage get plain losses
            require_gradient(losses)

    @classmethod
    def of(cls, model: nn.Module, options: Options, backend: Backend) -> CompileContext:
        homes = Homes()
        meta_init = MetaInit(model, homes.uninitialized, options.init, options.devices[0])
        meta_init.gather = backend.gather_text
        warnings = WarningsOnce()
        recomputes = options.checkpoint != "never"
        rebound = ReboundBuffers(model, is_active=backend.holds_model, recomputes=recomputes)
        return cls(model, backend, homes, meta_init, warnings, ChangingValues(model, warnings), rebound)
