"""What the user asked `compile` for, checked at once, before anything is traced, measured or moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from pipecompile.batching.batch_dims import BatchDims
from pipecompile.costs.links import Bandwidth, Links
from pipecompile.costs.user_costs import Given
from pipecompile.errors import InputError, ScheduleError
from pipecompile.graph.cut_constraints import Steering
from pipecompile.ir import Kind, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.parameters.meta_init import Source
from pipecompile.passes.checkpointing import Checkpoint, insert_recompute
from pipecompile.runtime.cells.torch_compiled import check_backend
from pipecompile.schedules import CATALOGUE, Builder, build_schedule
from pipecompile.verifiers import verify

__all__ = ["Options", "default_devices", "resolve_devices"]

_CHOICES = {
    "partitioner": ("auto", "dp", "ilp"),
    "cost": ("auto", "analytic", "profile"),
    "dispatch": ("auto", "inline", "threads"),
    "loss_reduction": ("mean", "sum"),
    "tied": ("auto", "together", "apart"),
    "batch_norm": (None, "each", "deferred"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `compile`. Construction raises InputError or ScheduleError for what cannot be."""

    n_stages: int
    n_microbatches: int | str | None
    batch_dims: BatchDims
    schedule: str | Schedule | Builder
    devices: tuple[torch.device, ...]
    loss_fn: Callable[..., Any] | None
    loss_reduction: str
    partitioner: str
    cost: str
    memory_limit: float | tuple[float, ...] | None
    plan: Plan | None
    dispatch: str
    time_limit: float
    cache_size: int
    tied: str = "auto"
    checkpoint: Checkpoint = "never"
    restored: int = 1
    batch_norm: str | None = None
    has_aux: bool = False
    compile_stages: bool | str = False
    cuda_graphs: bool = False
    steering: Steering = field(default_factory=Steering)
    costs: Given | None = None
    optimizer_state: int = 0
    speeds: tuple[float, ...] | None = None
    bandwidth: Bandwidth | None = None
    init: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        _check_count("n_stages", self.n_stages)
        _check_count("cache_size", self.cache_size)
        _check_count("restored", self.restored)
        if self.n_microbatches not in (None, "auto"):
            _check_count("n_microbatches", self.n_microbatches)
        for name, allowed in _CHOICES.items():
            if (given := getattr(self, name)) not in allowed:
                raise InputError(f"{name}={given!r} is not known", hint="one of " + ", ".join(map(repr, allowed)))
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise InputError(
                f"loss_fn is a {type(self.loss_fn).__name__}, not a function",
                hint="for example torch.nn.functional.cross_entropy",
            )
        if self.has_aux and self.loss_fn is None:
            raise InputError("has_aux=True, and no loss_fn", hint="a loss_fn that returns (loss, aux)")
        check_backend(self.compile_stages)
        self._check_machine()
        self._check_plan()
        self._check_open()
        schedule = self.schedule_for(self._some_count, custom=False)
        if self.schedule is schedule or isinstance(self.schedule, Schedule):
            verify(schedule)

    def _check_machine(self) -> None:
        for name, values in (("memory_limit", self.memory_limit), ("speeds", self.speeds)):
            if isinstance(values, tuple) and len(values) != len(self.devices):
                raise InputError(f"{name} lists {len(values)} of {len(self.devices)} devices")
            for value in values if isinstance(values, tuple) else () if values is None else (values,):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    raise InputError(f"{name} has {value!r}", hint="numbers above 0, one per device")

    def _check_plan(self) -> None:
        if self.plan is None:
            return
        if self.plan.n_stages != self.n_stages:
            raise InputError(f"the plan has {self.plan.n_stages} stages, n_stages is {self.n_stages}")
        if self.steering or self.costs is not None:
            what = "what is forced on the cut" if self.steering else "costs"
            raise InputError(f"a plan is given, and {what}", why="nothing is solved with a plan", hint="one of the two")

    def _check_open(self) -> None:
        """Raise InputError where the number of micro-batches cannot be chosen."""
        if self.n_microbatches != "auto":
            return
        if isinstance(self.schedule, Schedule):
            count = self.schedule.n_microbatches
            raise InputError(
                'n_microbatches="auto", and a schedule is given',
                why=f"it is for {count} micro-batches",
                hint=f"n_microbatches={count}, or name a schedule: it is built for any number",
            )
        if isinstance(self.costs, Mapping):
            raise InputError(
                'n_microbatches="auto", and costs are given in seconds',
                why="they hold for one size of micro-batches, and several are compared",
                hint="costs= a function of (graph, inputs), or a number of micro-batches",
            )
        if self.plan is not None and self.plan.considered is None:
            raise InputError(
                'n_microbatches="auto", and a plan is given that does not say how many',
                why="nothing is chosen with a plan",
                hint="the number that the plan was made for",
            )

    @property
    def links(self) -> Links:
        """What sending costs between the devices."""
        return Links.of(self.devices, self.bandwidth)

    @property
    def has_unequal_devices(self) -> bool:
        """Does it matter which device a stage is on, to the cut?"""
        return self.speeds is not None or self.memory_limit is not None or self.links.factors is not None

    @property
    def default_microbatches(self) -> int:
        """As asked for, as the schedule given has, or twice the number of devices."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.n_microbatches
        return self.n_microbatches if isinstance(self.n_microbatches, int) else 2 * len(self.devices)

    @property
    def has_open_choice(self) -> bool:
        """Is the number of micro-batches, or the schedule, to be chosen with the cut?"""
        return self.plan is None and "auto" in (self.n_microbatches, self.schedule)

    def with_choice_of(self, plan: Plan | None) -> Options:
        """With the number of micro-batches and the schedule that were chosen with the plan, where they were left open."""
        if plan is None or plan.considered is None or "auto" not in (self.n_microbatches, self.schedule):
            return self
        best = plan.considered.best
        count = best.n_microbatches if self.n_microbatches == "auto" else self.n_microbatches
        return replace(self, n_microbatches=count, schedule=best.schedule if self.schedule == "auto" else self.schedule)

    @property
    def _some_count(self) -> int:
        return self.n_microbatches if isinstance(self.n_microbatches, int) else 1

    def schedule_for(self, n_microbatches: int, *, custom: bool = True) -> Schedule:
        """The schedule for so many micro-batches, with what is recomputed. "auto" is searched for once there are costs; until
        then it is the one that its stages would run in order. Raises ScheduleError when a schedule given as such has
        another number of micro-batches.
        """
        checkpoint = "never" if self.checkpoint == "auto" else self.checkpoint  # until there is a plan
        return insert_recompute(self._plain(n_microbatches, custom=custom), checkpoint)

    def with_recompute(self, recompute: tuple[bool, ...]) -> Options:
        """With the stages that recompute, as the plan has them, when that was left to the solver."""
        return replace(self, checkpoint=recompute or "never") if self.checkpoint == "auto" else self

    @property
    def recompute(self) -> Literal["auto"] | tuple[bool, ...] | None:
        """Which stages recompute, as the partition problem has it."""
        if self.checkpoint in ("auto", "never"):
            return "auto" if self.checkpoint == "auto" else None
        return (True,) * self.n_stages if isinstance(self.checkpoint, str) else tuple(self.checkpoint)

    def restored_at_once(self, n_microbatches: int) -> int:
        """Of how many micro-batches a stage that recomputes may hold what it saves: with "except_last" also of the last."""
        is_all = self.checkpoint in ("always", "except_last")
        return self.restored + (self.checkpoint == "except_last" and n_microbatches > 1) if is_all else 1

    @property
    def has_backward(self) -> bool:
        """Has the schedule a backward?"""
        return self.kinds != {Kind.FORWARD}

    @cached_property
    def kinds(self) -> set[Kind]:
        """Which kinds of actions the schedule has; asked in every step."""
        rows = self.schedule_for(self._some_count, custom=False).rows
        return {action.kind for row in rows for action in row}

    def _plain(self, n_microbatches: int, *, custom: bool) -> Schedule:
        if not isinstance(self.schedule, Schedule):
            return self._built("interleaved" if self.schedule == "auto" else self.schedule, n_microbatches)
        counts = self.schedule.n_stages, self.schedule.n_devices
        if counts != (self.n_stages, len(self.devices)):
            raise ScheduleError(
                f"the schedule has {counts[0]} stages on {counts[1]} devices, not {self.n_stages} on {len(self.devices)}"
            )
        if custom and self.schedule.n_microbatches != n_microbatches:
            raise ScheduleError(
                f"the schedule is for {self.schedule.n_microbatches} micro-batches, the batch gives {n_microbatches}",
                hint="name a schedule instead, it is built for any number",
            )
        return self.schedule

    def _built(self, name: str | Builder, n_microbatches: int) -> Schedule:
        try:
            return build_schedule(name, self.n_stages, n_microbatches, n_devices=len(self.devices))
        except ScheduleError as error:
            wanted = default_devices(name, self.n_stages)
            if len(self.devices) == wanted:
                raise
            hint = f"devices= with {wanted} entries, one per pipeline device; repeats are allowed"
            raise ScheduleError(error.what, why=error.why, hint=hint) from None

    @cached_property
    def is_target_required(self) -> bool:
        """Does `loss_fn` refuse to be called with the output alone?"""
        try:
            inspect.signature(self.loss_fn).bind(None) if self.loss_fn else None
        except TypeError:
            return True
        except ValueError:  # a builtin without a signature: it will say so itself
            return False
        return False


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        more = ', or "auto"' if name == "n_microbatches" else ""
        raise InputError(f"{name} is {value!r}; it must be a whole number, at least 1{more}")


def default_devices(schedule: str | Schedule | Builder, n_stages: int) -> int:
    """How many pipeline devices there are when nobody says: one per stage, or as the schedule has them."""
    if isinstance(schedule, Schedule):
        return schedule.n_devices
    entry = CATALOGUE.get(schedule) if isinstance(schedule, str) else None
    return n_stages if entry is None else entry.devices(n_stages)


def resolve_devices(
    devices: Sequence[str | torch.device] | None, n_stages: int, schedule: str | Schedule | Builder = "1f1b"
) -> tuple[torch.device, ...]:
    """One device per pipeline device. None: the GPUs there are, neighbouring stages sharing one if they are few, else CPU.

    Raises InputError for a device that does not exist.
    """
    _check_count("n_stages", n_stages)
    if devices is None:
        count = default_devices(schedule, n_stages)
        gpus = min(torch.cuda.device_count(), count)
        return tuple(torch.device("cuda", i * gpus // count) if gpus else torch.device("cpu") for i in range(count))
    if isinstance(devices, (str, torch.device)) or not devices:
        raise InputError(
            f"devices={devices!r} is not a list of devices",
            hint=f'one entry per pipeline device, such as ["cpu"] * {default_devices(schedule, n_stages)}',
        )
    return tuple(map(_device, devices))


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{given!r} is not a device", why=str(error).splitlines()[0], hint="cpu, cuda:0, cuda:1 ..."
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    index = device.index if device.index is not None else 0
    if index >= count:
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise InputError(f"there is no device {given!s} here", why=f"the devices here are {there}")
    return torch.device(device.type, index)


def load_schedule(schedule: str | Path | Schedule | Builder) -> str | Schedule | Builder:
    """A schedule, the name or the builder of one, as given; or read from its file, a path or what ends with .csv. Raises ScheduleError."""
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        return Schedule.load(schedule)
    return schedule
