"""The machine: what stages and devices can do. The numbers of a problem that belong to no node, for one number of stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from pipecompile.errors import InputError
from pipecompile.partitioners.problem import Problem
from pipecompile.text.shown_value import shown

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Stages, and the devices under them.

    Indexed by stage: `device_of`, `in_flight` (micro-batches) and `recompute` (None: the solver decides). Indexed by device:
    `speed`, `memory_limit` (bytes) and `links` (factor on the time of a tensor, from row to column).
    """

    device_of: tuple[int, ...]
    in_flight: tuple[float, ...]
    recompute: tuple[bool | None, ...]
    speed: tuple[float, ...]
    memory_limit: tuple[float, ...]
    links: tuple[tuple[float, ...], ...] | None
    multicast: bool
    overlap: bool

    def __len__(self) -> int:
        return len(self.device_of)

    @classmethod
    def of(cls, problem: Problem, n_stages: int) -> Machine:
        """Return the machine of a problem. Raise InputError if a list or a pin does not match `n_stages`."""
        _check(problem, n_stages)
        device_of = problem.placement or tuple(range(n_stages))
        listed = (problem.speed, problem.memory_limit, problem.links)
        n_devices = max([1 + max(device_of), *(len(values) for values in listed if isinstance(values, tuple))])
        limit = inf if problem.memory_limit is None else problem.memory_limit
        default = None if problem.recompute == "auto" else False
        return cls(
            device_of=device_of,
            in_flight=problem.in_flight or (1.0,) * n_stages,
            recompute=problem.recompute if isinstance(problem.recompute, tuple) else (default,) * n_stages,
            speed=problem.speed or (1.0,) * n_devices,
            memory_limit=limit if isinstance(limit, tuple) else (limit,) * n_devices,
            links=problem.links,
            multicast=problem.multicast,
            overlap=problem.overlap,
        )

    @property
    def is_one_to_one(self) -> bool:
        """Whether stage s is alone on device s, for every s."""
        return self.device_of == tuple(range(len(self.speed)))

    @property
    def is_uniform(self) -> bool:
        """Whether all stages are alike, so that their number can change."""
        columns = (self.in_flight, self.recompute, self.speed, self.memory_limit)
        same = all(len(set(values)) <= 1 for values in columns)
        return self.is_one_to_one and self.links is None and same

    @property
    def has_memory_limit(self) -> bool:
        """Whether any device has a memory limit."""
        return min(self.memory_limit) < inf

    @property
    def min_link_factor(self) -> float:
        """The least factor on the time of a tensor between two different stages; 0 if two stages share a device."""
        if len(set(self.device_of)) < len(self.device_of):
            return 0.0
        factors = [self.link_factor(p, q) for p in self.device_of for q in self.device_of if p != q]
        return min(factors, default=1.0)

    @property
    def min_in_flight(self) -> float:
        """The least number of micro-batches for which any stage holds its activations."""
        return min(min(in_flight, 1.0) if recompute is not False else in_flight
                   for in_flight, recompute in zip(self.in_flight, self.recompute, strict=True))  # fmt: skip

    def link_factor(self, source: int, target: int) -> float:
        """Return the factor on the time of a tensor from device `source` to device `target`."""
        return 1.0 if self.links is None else self.links[source][target]

    def stages_on(self, device: int) -> list[int]:
        """Return the stages on a device, ascending."""
        return [s for s, d in enumerate(self.device_of) if d == device]

    def stages_by_device(self) -> list[list[int]]:
        """Return the stages on each device, ascending. Linear."""
        stages: list[list[int]] = [[] for _ in self.speed]
        for stage, device in enumerate(self.device_of):
            stages[device].append(stage)
        return stages

    def with_stages(self, n_stages: int) -> Machine:
        """Return a machine with another number of stages, each like the first. Requires `is_uniform`."""
        return replace(
            self, device_of=tuple(range(n_stages)), in_flight=self.in_flight[:1] * n_stages,
            recompute=self.recompute[:1] * n_stages, speed=self.speed[:1] * n_stages,
            memory_limit=self.memory_limit[:1] * n_stages,
        )  # fmt: skip

    def with_extra_memory(self, extra: float) -> Machine:
        """Return the same machine with `extra` more bytes on every device."""
        return replace(self, memory_limit=tuple(limit + extra for limit in self.memory_limit))


def _check(problem: Problem, n_stages: int) -> None:
    where = f"problem {shown(problem.name)}" if problem.name else ""
    per_stage = ["placement", "in_flight", "recompute"]
    if problem.placement is None:
        per_stage = ["memory_limit", "in_flight", "speed", "links", "recompute"]
    for field in per_stage:
        values = getattr(problem, field)
        if isinstance(values, tuple) and len(values) != n_stages:
            count = f"{len(values)} stage" + "s" * (len(values) != 1)
            raise InputError(f"n_stages is {n_stages}, but {field} lists {count}",
                             where=where, hint=f"n_stages={len(values)}")  # fmt: skip
    for name, stage in problem.pins.items():
        if stage >= n_stages:
            raise InputError(f"node {shown(name)} is pinned to stage {stage}, but n_stages is {n_stages}",
                             where=where, hint=f"n_stages={stage + 1} or more")  # fmt: skip
