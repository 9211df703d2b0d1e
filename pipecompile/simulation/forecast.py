"""`forecast`: a whole training step, as far as costs are known: the pipeline, reductions, the optimizer, and how much a step may vary.

    device 0 │ 2B2  2B3  0B2  0B3         step 2  step 0
    reduces  │           [stage 2 ─────]  [stage 0]

A draw multiplies the seconds of every action, transfer, reduction and optimizer step by a factor of its own, log-normal with mean 1. A
step waits for the slowest of many, so the mean of the draws is longer than the step without jitter. It may be shorter where other copies
queue for an engine in another order: with engines="device", and with nics.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from random import Random
from statistics import fmean
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import HOST, Program, Route, Schedule
from pipecompile.ir.directions import stage_devices
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.simulation.contention_walk import walk_contended
from pipecompile.simulation.costs import CostOptions, Costs, Engines, PerStage
from pipecompile.simulation.gradient_reductions import gradient_ends, optimizer_times, reduction_times, row_ends
from pipecompile.simulation.simulator import build_tasks, make_timeline, run_to_end
from pipecompile.simulation.task_graph import TaskGraph, Times
from pipecompile.text.input_checks import amount, amounts, whole
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["StepForecast", "forecast"]

REDUCE = "reduce"
"""Track of the reductions of gradients among copies of the pipeline."""


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A predicted training step: the `timeline` without jitter, with reductions and optimizer steps, and the `draws`, the seconds of a step
    under each draw of the jitter.
    """

    timeline: Timeline
    draws: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of a step without jitter."""
        return self.timeline.makespan

    @property
    def mean(self) -> float:
        """Return the mean seconds of the draws; `seconds` without draws."""
        return fmean(self.draws) if self.draws else self.seconds

    @property
    def worst(self) -> float:
        """Return the longest seconds of the draws; `seconds` without draws."""
        return max(self.draws, default=self.seconds)

    def __repr__(self) -> str:
        figures = f"seconds={self.seconds:.6g}, mean={self.mean:.6g}, worst={self.worst:.6g}"
        return f"StepForecast({figures}, {len(self.draws)} draws)"


_MOST_DRAWS = 100_000
"""Draws of a forecast: each is a simulation, and the mean of fewer has three digits."""


@without_collection
def forecast(
    subject: Schedule | Program,
    *,
    routes: Sequence[Route] | None = None,
    reduction: PerStage = 0.0,
    optimizer: PerStage = 0.0,
    rendezvous: bool = False,
    nics: Sequence[int] | None = None,
    contention: float = 0.0,
    jitter: float = 0.0,
    draws: int = 100,
    seed: int = 0,
    **costs: Unpack[CostOptions],
) -> StepForecast:
    """Return the predicted training step of a schedule or program under the costs of `simulate` and more.

    `reduction`: seconds per stage to reduce its gradients among copies of the pipeline. It begins after the last action of the
    stage and the collective of its REDUCE_GRAD, beside what its device still computes, on links of its own; a device reduces one stage at a time. `optimizer`: seconds
    per stage of the optimizer step, after the last action of its device, once the gradients are reduced and those of ties are added.
    Several copies of a stage reduce its gradients together, after the last action of all, and each has an optimizer step.

    `rendezvous`: in each SEND and RECV of a program, both devices wait until the transfer is over. By default receives are posted early and
    sends are buffered, as the runtime does.

    `nics`: per device the number of the network card that it shares with others. A transfer between devices of two cards occupies
    the sending side of one and the receiving side of the other, first come, first served; devices of one card have links of their
    own.

    `contention`: share by which compute takes longer while a copy to or from its device is under way. Not together with `launch`,
    `streams` or `engines="device"`.

    `jitter`: relative standard deviation of the seconds of every action, transfer, reduction and optimizer step, drawn `draws` times (a
    number of steps) from `seed`.

    Raise what `simulate` raises, and InputError for `rendezvous` of a schedule, which has no sends.
    """
    _check_rendezvous(rendezvous, subject)
    tasks, checked = build_tasks(subject, routes, rendezvous=rendezvous, **costs)
    if nics is not None:
        tasks.engines = _shared(tasks, _checked_cards(nics, subject.n_devices))
    names = ("reduction", reduction), ("optimizer", optimizer)
    after = [amounts(name, value, subject.n_stages, "stage") for name, value in names]
    slowness = _checked_contention(contention, tasks, checked)
    deviation, count, random = (
        amount("jitter", jitter),
        whole("draws", draws, 0, _MOST_DRAWS),
        Random(whole("seed", seed, 0)),
    )
    times = _run(subject, tasks, checked, slowness)
    timeline = make_timeline(subject, tasks, times)
    homes = stage_devices(subject)
    spans = _after_the_pipeline(tasks, times, homes, *after)
    results = []
    seconds, delays = tasks.seconds, tasks.delays
    for _ in range(count if deviation else 0):
        tasks.seconds, tasks.delays = (_drawn(each, deviation, random) for each in (seconds, delays))
        drawn = _run(subject, tasks, checked, slowness)
        rest = _after_the_pipeline(tasks, drawn, homes, *(_drawn(each, deviation, random) for each in after))
        results.append(max([drawn.makespan, *(span.end for span in rest)]))
    return StepForecast(replace(timeline, spans=(*timeline.spans, *spans)), tuple(results))


def _check_rendezvous(rendezvous: object, subject: object) -> None:
    if not isinstance(rendezvous, bool):
        raise InputError(f"rendezvous={shown(rendezvous)} is not a bool", hint="rendezvous=True")
    if rendezvous and isinstance(subject, Schedule):
        raise InputError("rendezvous needs a program", why="a schedule has no sends", hint="lower(schedule)")


def _checked_contention(contention: float, tasks: TaskGraph, costs: Costs) -> float:
    share = amount("contention", contention)
    if share and (tasks.issued or tasks.after or costs.engines is Engines.DEVICE):
        why = "launch, streams and engines='device' have resources that are simulated at full speed alone"
        raise InputError("contention goes together with links and nics only", why=why, hint="contention=0")
    return share


def _run(subject: Schedule | Program, tasks: TaskGraph, costs: Costs, contention: float) -> Times:
    """Return the times. Raise VerifyError with the faults of a program that does not run to its end."""
    if contention and (times := walk_contended(tasks, contention)).is_complete:
        return times
    return run_to_end(subject, tasks, costs)


def _checked_cards(nics: Sequence[int], n_devices: int) -> list[int]:
    if isinstance(nics, str) or not isinstance(nics, Sequence):
        raise InputError(
            f"nics={shown(nics)} is not a number per device", hint="[0, 0, 1, 1]: two devices on each of two cards"
        )
    if len(nics) != n_devices:
        raise InputError(
            f"nics has {counted(len(nics), 'number')} for {counted(n_devices, 'device')}", hint="one per device"
        )
    return [whole("nics", number, 0) for number in nics]


def _shared(tasks: TaskGraph, cards: Sequence[int]) -> dict[tuple[int, int], tuple[Hashable, ...]]:
    """Return, per link between devices of two cards, the sides of the cards that its transfers occupy."""
    return {
        (source, target): (("out", cards[source]), ("in", cards[target]))
        for source, target in set(tasks.links)
        if HOST not in (source, target) and cards[source] != cards[target]
    }


def _drawn(seconds: Sequence[float], deviation: float, random: Random) -> list[float]:
    """Return each number times a log-normal factor with mean 1 and this standard deviation."""
    sigma = sqrt(log(1 + deviation**2))
    return [each and each * exp(random.gauss(-sigma * sigma / 2, sigma)) for each in seconds]


def _after_the_pipeline(
    tasks: TaskGraph,
    times: Times,
    homes: Sequence[Sequence[int]],
    reduction: Sequence[float],
    optimizer: Sequence[float],
) -> list[Span]:
    """Return the spans of reductions and optimizer steps that take time. `homes` has the devices of each stage."""
    reduced = reduction_times(gradient_ends(tasks, times), homes, reduction)
    steps = optimizer_times(reduced, row_ends(tasks, times), homes, optimizer)
    on_devices = {(stage, device): ends for stage, ends in reduced.items() for device in homes[stage]}
    return [*_spans(REDUCE, "gradients", on_devices), *_spans(COMPUTE, "optimizer", steps)]


def _spans(track: str, name: str, times: dict[tuple[int, int], tuple[float, float]]) -> Iterator[Span]:
    for (stage, device), (begin, end) in times.items():
        if end > begin:
            yield Span(device, track, f"{name} {stage}", begin, end)
