"""The keywords of `compile`, resolved and checked in one place before anything is traced, measured or moved.

    keywords of the call ──Options.of──►  one check per value      wrong types, values, lengths and names      settings/
                                          then values together     devices, plan and schedule fit each other   here

Options are flat: every keyword is an attribute, whichever group of settings/ it belongs to. `dataclasses.replace` checks its
result in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx, nn

from pipecompile.batching.batch_dims import check_arguments, check_batch_dims
from pipecompile.errors import InputError, ScheduleError
from pipecompile.graph.module_names import nodes_of_module
from pipecompile.ir import UNTRAINED, Kind, Route, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.parameters.meta_init import sources_of
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.offloading import insert_offload
from pipecompile.passes.sharding import insert_sharding
from pipecompile.settings.batch_settings import BatchSettings
from pipecompile.settings.cut_settings import CutSettings, check_module_name, resolve_constraints, stage_count
from pipecompile.settings.direction_choice import check_directions
from pipecompile.settings.exclusions import check_offload, check_plan, check_reshard, check_slices
from pipecompile.settings.machine_settings import (
    MachineSettings,
    check_graphs,
    optimizer_copies,
    resolve_devices,
    resolve_partitions,
)
from pipecompile.settings.run_settings import RunSettings, built_schedule, load_schedule
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted
from pipecompile.verifiers import verify

__all__ = ["Options", "load_schedule"]


@dataclass(frozen=True, kw_only=True)
class Options(BatchSettings, MachineSettings, CutSettings, RunSettings):
    """The keywords of `compile` in canonical form. Construction raises InputError, ScheduleError or PlanError."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        n_stages: Any,
        *,
        schedule: Any,
        devices: Any,
        optimizer: Any,
        init: Any,
        split_before: Any,
        keep_together: Any,
        pin: Any,
        balance: Any,
        **values: Any,
    ) -> Options:
        """Resolve the keywords of `compile`: those named here need the model, other keywords, or another form; the rest are fields.

        Raise InputError, ScheduleError or PlanError that names the keyword. Nothing is changed, of the model or of the process.
        """
        n_stages, schedule = stage_count("n_stages", n_stages), load_schedule(schedule)
        options = cls(
            n_stages=n_stages,
            schedule=schedule,
            devices=resolve_devices(devices, n_stages, schedule),
            partitions=resolve_partitions(devices),
            optimizer_state=optimizer_copies(optimizer),
            steering=resolve_constraints(
                model, n_stages, split_before=split_before, keep_together=keep_together, pin=pin, balance=balance
            ),
            init=sources_of(init, model),
            **values,
        )
        check_batch_dims(options.batch_dims, model.forward, ("target",))
        check_arguments("split", options.split, model.forward)
        for module in options.costs if isinstance(options.costs, Mapping) else ():
            check_module_name("costs", module, model)
        return options

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None:
            check_plan(self.plan, self.steering, self.costs, self.checkpoint)
        self._check_count()
        check_graphs(self.partitions, cuda_graphs=self.cuda_graphs, dispatch=self.dispatch)
        if isinstance(self.checkpoint, tuple) and len(self.checkpoint) != self.n_stages:
            hint = f"checkpoint={[*self.checkpoint, *(False,) * self.n_stages][: self.n_stages]}"
            raise ScheduleError(f"checkpoint has {len(self.checkpoint)} flags for {self.n_stages} stages", hint=hint)
        if self.offload:
            check_offload(self.schedule, self.checkpoint, self.across_batch)
        if self.reshard_after_forward:
            check_reshard(self.shards, self.schedule, offload=self.offload, across_batch=self.across_batch)
        if isinstance(self.schedule, WrittenProgram):
            self._check_written(self.schedule)
        schedule = self.schedule_for(self.any_count, custom=False)
        if self.schedule is schedule or isinstance(self.schedule, Schedule):
            verify(schedule)
        check_slices(schedule, self)
        check_directions(schedule, self)
        if self.across_batch == "exact":
            self._check_meeting()
        if self.passes:
            self._check_passes()

    def _check_passes(self) -> None:
        """Raise InputError for passes where no schedule of the user's step is lowered."""
        what, why, hint = "a Program", "it is not lowered", "schedule=my_pass(program)"
        if self.across_batch == "exact":
            what, hint = 'across_batch="exact"', "one of the two"
            why = "such a step runs two programs, one up to the loss and one from there on"
        if what != "a Program" or isinstance(self.schedule, WrittenProgram):
            raise InputError(f"passes are given together with {what}", why=why, hint=hint)

    def _check_count(self) -> None:
        """Raise InputError where the number of micro-batches is not that of the Schedule, or cannot be chosen."""
        count = self.default_microbatches
        if isinstance(self.schedule, Schedule) and self.n_microbatches not in (None, count):
            raise InputError(
                f"n_microbatches={self.n_microbatches} is given together with a Schedule".replace("=auto", '="auto"'),
                why=f"the schedule is for {count} micro-batch{'es' * (count != 1)}",
                hint=f"n_microbatches={count}, or the name of a schedule, which is built for any number",
            )
        if self.n_microbatches != "auto":
            return
        if isinstance(self.costs, Mapping):
            raise InputError(
                'n_microbatches="auto" is given together with costs in seconds',
                why="the seconds hold for one size of micro-batches, and several sizes are compared",
                hint="costs=function of (graph, inputs), or a number of micro-batches",
            )
        if self.plan is not None and self.plan.considered is None:
            raise InputError(
                'n_microbatches="auto" is given together with a plan that has no number of micro-batches',
                why="nothing is chosen with a plan",
                hint=f"n_microbatches={self.default_microbatches}, or the number that the plan was made for",
            )

    def _check_written(self, written: WrittenProgram) -> None:
        """Raise VerifyError for a program that is not legal, with the lines of its faults; InputError for keywords that it excludes."""
        from pipecompile.verifiers.verification import verify_written

        verify_written(written)
        keyword, value, why = "checkpoint", self.checkpoint, "the program has an R for each forward that runs again"
        if self.across_batch == "exact":
            keyword, value, why = (
                "across_batch",
                "exact",
                "such a step runs two programs, one up to the loss and one from there on",
            )
        if value not in ("never", (False,) * self.n_stages):
            hint = f"no {keyword}, or the name of a schedule"
            raise InputError(f"{keyword}={shown(value)} is given together with a Program", why=why, hint=hint)

    def _check_meeting(self) -> None:
        """Raise ScheduleError for a schedule in which the micro-batches of a mini-batch cannot meet behind the last stage."""
        schedule = self.schedule_for(2 * len(self.devices), custom=False)
        order = [[action.kind is Kind.FORWARD for action in row] for row in schedule.rows]
        if self.schedule == "auto" or any(row != sorted(row, reverse=True) for row in order):
            raise ScheduleError(
                f'across_batch="exact" is given together with schedule={shown(self.schedule)}',
                why="it runs backwards before all micro-batches have left the last stage, where their samples meet",
                hint='schedule="gpipe"',
            )

    def check_names(self, graph: fx.GraphModule) -> None:
        """Raise InputError for a name, in a constraint or in `costs`, that matches no node of the recording, with the nearest
        name, and for a node that is to be in two stages.

        The check needs the recording only: it comes before costs are measured.
        """
        names = [("split_before", name) for name in self.steering.split_before]
        names += [("keep_together", name) for group in self.steering.together_on(graph) for name in group]
        names += [("pin", name) for name, _ in self.steering.pins]
        names += [("costs", name) for name in (self.costs if isinstance(self.costs, Mapping) else ())]
        for keyword, name in names:
            nodes_of_module(graph, name, keyword)
        self.steering.pinned(graph)

    # -- choices left open ------------------------------------------------------------------------------------------

    @property
    def has_open_choice(self) -> bool:
        """Whether the number of micro-batches, or the schedule, is chosen with the cut."""
        return self.plan is None and "auto" in (self.n_microbatches, self.schedule)

    def with_choice_of(self, plan: Plan | None) -> Options:
        """Return options with the number of micro-batches and the schedule of the plan's best candidate where "auto" stood."""
        if plan is None or plan.considered is None or "auto" not in (self.n_microbatches, self.schedule):
            return self
        best = plan.considered.best
        count = best.n_microbatches if self.n_microbatches == "auto" else self.n_microbatches
        return replace(self, n_microbatches=count, schedule=best.schedule if self.schedule == "auto" else self.schedule)

    def with_recompute(self, recompute: tuple[bool, ...]) -> Options:
        """Return options with the plan's flag per stage as `checkpoint` where "auto" stood."""
        return replace(self, checkpoint=recompute or "never") if self.checkpoint == "auto" else self

    # -- micro-batches and recomputation ----------------------------------------------------------------------------

    @property
    def default_microbatches(self) -> int:
        """Number of micro-batches: `n_microbatches`, else that of the Schedule, else twice the number of devices."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.n_microbatches
        return self.n_microbatches if isinstance(self.n_microbatches, int) else 2 * len(self.devices)

    @property
    def any_count(self) -> int:
        return self.n_microbatches if isinstance(self.n_microbatches, int) else 2

    @property
    def recompute(self) -> Literal["auto"] | tuple[bool, ...] | None:
        """Stages that recompute, in the form of the partition problem: "auto", a flag per stage, or None for no stage."""
        if self.checkpoint in ("auto", "never"):
            return "auto" if self.checkpoint == "auto" else None
        return (True,) * self.n_stages if isinstance(self.checkpoint, str) else tuple(self.checkpoint)

    def restored_at_once(self, n_microbatches: int) -> int:
        """Return the largest number of micro-batches whose saved values a recomputing stage holds at a time. With "except_last"
        the last micro-batch, which is not recomputed, counts too.
        """
        is_all = self.checkpoint in ("always", "except_last")
        return self.restored + (self.checkpoint == "except_last" and n_microbatches > 1) if is_all else 1

    # -- the schedule -----------------------------------------------------------------------------------------------

    @cached_property
    def n_slices(self) -> int:
        """Number of slices per micro-batch along the sequence; 1 for whole micro-batches. Cached, since every step reads it."""
        return self.schedule_for(self.any_count, custom=False).n_slices

    @property
    def has_target(self) -> bool:
        """Whether a step is expected to have a target: the program of the user has one, or there is a loss function."""
        return self.schedule.has_target if isinstance(self.schedule, WrittenProgram) else self.loss_fn is not None

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains: it has other actions than forwards."""
        return not self.kinds <= UNTRAINED

    @property
    def is_training_now(self) -> bool:
        """Whether a step at this place adds gradients: the schedule has a backward, and gradients are on."""
        return self.has_backward and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    @cached_property
    def kinds(self) -> set[Kind]:
        """Kinds of actions in the schedule. Cached, since every step reads them."""
        rows = self.schedule_for(self.any_count, custom=False).rows
        return {action.kind for row in rows for action in row}

    def schedule_for(
        self, n_microbatches: int, *, custom: bool = True, routes: Sequence[Route] | None = None
    ) -> Schedule:
        """Return the schedule of `n_microbatches`, with its recomputation, offloading or resharding, for the DAG of stages that
        `routes` make, by default a chain. For "auto", which is searched once costs are known, it is "interleaved".

        Raise ScheduleError if a Schedule has another number of micro-batches; not so with `custom=False`.
        """
        checkpoint = "never" if self.checkpoint == "auto" else self.checkpoint  # until there is a plan
        schedule = self._without_recompute(n_microbatches, custom, routes)
        if self.offload:
            return insert_offload(schedule)
        schedule = schedule if checkpoint == "never" else insert_recompute(schedule, checkpoint)
        return insert_sharding(schedule) if self.reshard_after_forward else schedule

    def _without_recompute(self, n_microbatches: int, custom: bool, routes: Sequence[Route] | None) -> Schedule:
        if not isinstance(self.schedule, Schedule):
            name = "interleaved" if self.schedule == "auto" else self.schedule
            return built_schedule(name, self.n_stages, n_microbatches, len(self.devices), routes)
        counts = self.schedule.n_stages, self.schedule.n_devices
        if counts != (self.n_stages, len(self.devices)):
            raise ScheduleError(
                f"the schedule has {counted(counts[0], 'stage')} on {counted(counts[1], 'device')}, not {self.n_stages} on {len(self.devices)}",
                hint=f'n_stages={counts[0]}, devices=["cpu"] * {counts[1]}',
            )
        if custom and self.schedule.n_microbatches != n_microbatches:
            raise ScheduleError(
                f"the schedule is for {counted(self.schedule.n_microbatches, 'micro-batch')}, the batch gives {n_microbatches}",
                hint='the name of a schedule, such as schedule="1f1b", which is built for any number',
            )
        return self.schedule.plain if isinstance(self.schedule, WrittenProgram) else self.schedule
