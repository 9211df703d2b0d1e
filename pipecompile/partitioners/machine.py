"""What stages and devices can do: the numbers of a problem that do not belong to a node, spread over a number of stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from pipecompile.errors import InputError
from pipecompile.partitioners.problem import Problem

__all__ = ["Stages"]


@dataclass(frozen=True, slots=True)
class Stages:
    """`device`, `in_flight` and `recompute` (None: the solver chooses) count stages; `speed`, `limit` and `links` devices."""

    device: tuple[int, ...]
    in_flight: tuple[float, ...]
    recompute: tuple[bool | None, ...]
    speed: tuple[float, ...]
    limit: tuple[float, ...]
    links: tuple[tuple[float, ...], ...] | None
    multicast: bool
    overlap: bool

    def __len__(self) -> int:
        return len(self.device)

    @classmethod
    def of(cls, problem: Problem, n_stages: int) -> Stages:
        """Spread the problem's numbers over the stages. Raises InputError when a list or a pin does not suit them."""
        _check(problem, n_stages)
        device = problem.placement or tuple(range(n_stages))
        listed = (problem.speed, problem.memory_limit, problem.links)
        n_devices = max([1 + max(device), *(len(values) for values in listed if isinstance(values, tuple))])
        limit = inf if problem.memory_limit is None else problem.memory_limit
        chosen = None if problem.recompute == "auto" else False
        return cls(
            device=device,
            in_flight=problem.in_flight or (1.0,) * n_stages,
            recompute=problem.recompute if isinstance(problem.recompute, tuple) else (chosen,) * n_stages,
            speed=problem.speed or (1.0,) * n_devices,
            limit=limit if isinstance(limit, tuple) else (limit,) * n_devices,
            links=problem.links,
            multicast=problem.multicast,
            overlap=problem.overlap,
        )

    @property
    def direct(self) -> bool:
        """Whether stage s is alone on device s."""
        return self.device == tuple(range(len(self.speed)))

    @property
    def alike(self) -> bool:
        """Whether stages can be renumbered, as long as their order stays, and nothing changes."""
        same = all(len(set(values)) <= 1 for values in (self.in_flight, self.recompute, self.speed, self.limit))
        return self.direct and self.links is None and same

    @property
    def bounded(self) -> bool:
        """Whether any device has a memory limit."""
        return min(self.limit) < inf

    @property
    def cheapest(self) -> float:
        """The least that a tensor's time can be multiplied by when it goes from one stage to another."""
        if len(set(self.device)) < len(self.device):
            return 0.0
        pairs = [self.factor(p, q) for p in self.device for q in self.device if p != q]
        return min(pairs, default=1.0)

    @property
    def least_flying(self) -> float:
        """The least number of micro-batches for which activations are held, wherever a node is."""
        return min(min(flying, 1.0) if redone is not False else flying
                   for flying, redone in zip(self.in_flight, self.recompute, strict=True))  # fmt: skip

    def factor(self, source: int, target: int) -> float:
        """What the link from one device to another multiplies a tensor's time by."""
        return 1.0 if self.links is None else self.links[source][target]

    def on(self, device: int) -> list[int]:
        """The stages on a device."""
        return [s for s, d in enumerate(self.device) if d == device]

    def times(self, n_stages: int) -> Stages:
        """So many stages, each like the first of these, which are alike."""
        return replace(
            self, device=tuple(range(n_stages)), in_flight=self.in_flight[:1] * n_stages,
            recompute=self.recompute[:1] * n_stages, speed=self.speed[:1] * n_stages, limit=self.limit[:1] * n_stages,
        )  # fmt: skip

    def raised(self, excess: float) -> Stages:
        """The same with so much more memory on every device."""
        return replace(self, limit=tuple(limit + excess for limit in self.limit))


def _check(problem: Problem, n_stages: int) -> None:
    where = f"problem {problem.name!r}" if problem.name else ""
    per_stage = ["placement", "in_flight", "recompute"]
    if problem.placement is None:
        per_stage = ["memory_limit", "in_flight", "speed", "links", "recompute"]
    for field in per_stage:
        values = getattr(problem, field)
        if isinstance(values, tuple) and len(values) != n_stages:
            raise InputError(f"n_stages is {n_stages}, but {field} lists {len(values)} stages",
                             where=where, hint=f"n_stages={len(values)}")  # fmt: skip
    for name, stage in problem.pins.items():
        if stage >= n_stages:
            raise InputError(f"node {name!r} is pinned to stage {stage}, but n_stages is {n_stages}",
                             where=where, hint=f"n_stages={stage + 1} or more")  # fmt: skip
