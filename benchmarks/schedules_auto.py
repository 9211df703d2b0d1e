"""`auto_schedule` against the whole catalogue, and against its own lower bound, on random profiles.

    python benchmarks/schedules_auto.py [--profiles 1000] [--every 1] [--seconds 3600]
        [--resume benchmarks/results/schedules_auto.jsonl] [--markdown benchmarks/results/schedules_auto.md]

A profile has unequal stages, transfers from free to slow, one or several stages per device, sometimes skips, and a memory
limit from tight to none. Every schedule of the catalogue that fits the memory is simulated on it. With `--resume`, profiles that a file
lists are not searched again, and each outcome is appended to it; `--seconds` is the time after which no further profile is begun.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time

import msgspec

from pipecompile.ir import Route, Schedule, chain
from pipecompile.schedules import CATALOGUE, auto_schedule
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.simulation.costs import CostOptions, Costs, make_costs
from pipecompile.verifiers import verify

LIMITS = {"tight": 0.3, "half": 0.6, "as 1F1B": 1.0, "loose": 2.0, "none": None}
"""Room on every device, in what its share of P micro-batches in flight would take."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What is given to `auto_schedule`."""

    devices: int
    chunks: int
    microbatches: int
    routes: tuple[Route, ...]
    costs: CostOptions
    limit: str
    room: tuple[float, ...] | None
    checkpoint: str

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def placements(self) -> list[tuple[int, ...]]:
        return [loop(self.stages, self.devices), *([vee(self.devices)] if self.chunks == 2 else [])]

    def checked(self) -> Costs:
        return make_costs(self.stages, self.devices, self.routes, **self.costs)


def draw(rng: random.Random, most_devices: int = 8, most_microbatches: int = 32) -> Profile:
    """A profile with at least one schedule that fits."""
    devices, chunks = rng.randint(2, most_devices), rng.choice([1, 1, 2, 2, 3])
    microbatches = rng.choice([devices, 2 * devices, 4 * devices, rng.randint(1, most_microbatches)])
    stages = devices * chunks
    spread = rng.choice([1.0, 1.2, 1.5, 2.0, 3.0])
    forward = [rng.uniform(1 / spread, spread) for _ in range(stages)]
    input_share, weight_share = rng.uniform(0.6, 1.6), rng.uniform(0.4, 1.4)
    slowness = rng.choice([0.0, 0.05, 0.2, 0.5, 1.0])
    saved = [rng.uniform(1 / spread, spread) * 100 for _ in range(stages)]
    routes = _routes(rng, stages)
    costs = CostOptions(
        forward=forward,
        input_grad=[time * input_share * rng.uniform(0.8, 1.2) for time in forward],
        weight_grad=[time * weight_share * rng.uniform(0.8, 1.2) for time in forward],
        transfer={route.value: slowness * rng.uniform(0.5, 1.5) for route in routes},
        saved_bytes=saved,
        weight_saved_bytes=[size * rng.uniform(0.3, 1.0) for size in saved],
        recipe_bytes=1.0,
        parameter_bytes=[rng.uniform(50, 150) for _ in range(stages)],
    )
    limit = rng.choice(list(LIMITS))
    profile = Profile(devices, chunks, microbatches, routes, costs, limit, None, rng.choice(["never", "never", "auto"]))
    return profile if LIMITS[limit] is None else _bounded(profile, LIMITS[limit] or 0.0)


def _routes(rng: random.Random, stages: int) -> tuple[Route, ...]:
    """A chain, and in a third of the cases some skips."""
    routes = [Route(route.value, route.source, route.consumers, rng.uniform(1, 10)) for route in chain(stages)]
    for index in range(rng.choice([0, 0, rng.randint(1, 3)]) if stages > 2 else 0):
        source = rng.randrange(stages - 2)
        routes.append(Route(f"skip{index}", source, (rng.randrange(source + 2, stages),), rng.uniform(1, 10)))
    return tuple(routes)


def _bounded(profile: Profile, share: float) -> Profile:
    """With `share` times what P micro-batches take on every device, and at least what one after the other takes."""
    costs = profile.checked()
    least = [0.0] * profile.devices
    for place in profile.placements():
        evaluator = Evaluator(place, profile.routes, costs, MemoryLimit((0.0,) * profile.devices, in_bytes=True))
        serial = evaluator.peaks(_serial(place))
        per_microbatch = [
            sum(costs.saved[s] for s, home in enumerate(place) if home == d) for d in range(profile.devices)
        ]
        wanted = [
            c + share * profile.devices * size
            for c, size in zip(evaluator.parameter_bytes, per_microbatch, strict=True)
        ]
        least = [max(*each) for each in zip(least, serial, wanted, strict=True)]
    return Profile(*(getattr(profile, name) for name in Profile.__slots__[:6]), tuple(least), profile.checkpoint)


def _serial(placement: Sequence[int]) -> Schedule:
    rows: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for letter, order in (("F", range(len(placement))), ("B", reversed(range(len(placement))))):
        for stage in order:
            rows[placement[stage]].append(f"{stage}{letter}0")
    return Schedule.from_rows(rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The memory class of a profile, the step that was found, the best of the catalogue that fits (None when nothing does), the proven
    bound, and the processor seconds that the search took.
    """

    limit: str
    found: float
    catalogue: float | None
    bound: float
    is_optimal: bool
    seconds: float

    @property
    def is_worse(self) -> bool:
        return self.catalogue is not None and self.found > self.catalogue * (1 + 1e-9)


def outcome(profile: Profile, effort: float = 1.0) -> Outcome:
    """Search, check, and compare."""
    start = process_time()
    schedule = auto_schedule(
        profile.stages,
        profile.microbatches,
        n_devices=profile.devices,
        routes=profile.routes,
        memory_limit=profile.room,
        checkpoint=profile.checkpoint,
        effort=effort,
        **profile.costs,
    )
    seconds = process_time() - start
    costs, limit = profile.checked(), None if profile.room is None else MemoryLimit(profile.room, in_bytes=True)
    evaluator = Evaluator(schedule.placement, profile.routes, costs, limit)
    assert schedule.certificate is not None
    verify(schedule, routes=profile.routes)
    assert not any(evaluator.excess(schedule)), "it does not fit"
    return Outcome(
        profile.limit,
        evaluator.seconds(schedule),
        min(_catalogue(profile, costs, limit), default=None),
        schedule.certificate.bound,
        schedule.certificate.is_optimal,
        seconds,
    )


def _catalogue(profile: Profile, costs: Costs, limit: MemoryLimit | None) -> Iterator[float]:
    for entry in CATALOGUE.values():
        if entry.compared and entry.chunks in (None, profile.chunks):
            schedule = entry.build(profile.stages, profile.microbatches, profile.devices)
            evaluator = Evaluator(schedule.placement, profile.routes, costs, limit)
            if not any(evaluator.excess(schedule)):
                yield evaluator.seconds(schedule)


def page(outcomes: Sequence[Outcome], of: int) -> str:
    """The table as markdown. `of` is the number of the profiles from which these are."""
    head = ["memory", "profiles", "worse than the catalogue", "some of it fits", "shorter than it by", "its gap, mean"]
    head += ["gap, mean", "median", "worst", "proven optimal", "search s, mean", "worst"]
    lines = [
        "# auto_schedule beside the catalogue",
        "",
        f"Written by `benchmarks/schedules_auto.py`: {len(outcomes)} of {of:,} random profiles, chosen by their numbers alone. The gap is the simulated step over the lower bound that the",
        "search proved, minus 1: to the optimum where one is proven. The bound counts memory, the buffers of values, and",
        "recomputation. The room is what the activations of P micro-batches take, times 0.3 (tight), 0.6 (half), 1, 2 (loose), and at",
        "least what one micro-batch after the other needs. In a third of the profiles recomputation is allowed. Search times are",
        "seconds of the processor.",
        "",
        f"Never worse than the catalogue: {not any(each.is_worse for each in outcomes)}.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(_line(limit, [each for each in outcomes if each.limit == limit]) for limit in LIMITS),
        _line("all", outcomes),
    ]
    return "\n".join(lines) + "\n"


def _line(limit: str, outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return f"| {limit} | 0 |" + " |" * 10
    ours = [each.found / each.bound - 1 for each in outcomes]
    theirs = [each.catalogue / each.bound - 1 for each in outcomes if each.catalogue is not None]
    gains = [1 - each.found / each.catalogue for each in outcomes if each.catalogue is not None]
    cells = [
        limit,
        len(outcomes),
        sum(each.is_worse for each in outcomes),
        len(theirs),
        f"{statistics.fmean(gains):.1%}" if gains else "",
        f"{statistics.fmean(theirs):.1%}" if theirs else "",
        f"{statistics.fmean(ours):.1%}",
        f"{statistics.median(ours):.1%}",
        f"{max(ours):.1%}",
        f"{sum(each.is_optimal for each in outcomes) / len(ours):.0%}",
        f"{statistics.fmean(each.seconds for each in outcomes):.2f}",
        f"{max(each.seconds for each in outcomes):.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def resumed(path: Path | None) -> dict[int, Outcome]:
    """The outcomes that a file lists, by the number of their profile."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return dict(msgspec.json.decode(line, type=tuple[int, Outcome]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the profiles")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no profile after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="outcomes so far, continued")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    outcomes, end = resumed(arguments.resume), monotonic() + arguments.seconds
    for number in range(0, arguments.profiles, arguments.every):
        if number in outcomes:
            continue
        if monotonic() > end:
            break
        found = outcomes[number] = outcome(draw(random.Random(f"{arguments.seed} {number}")))
        print(number, found.limit, f"{found.found / found.bound - 1:.2%}", flush=True)
        if found.is_worse:
            print(f"profile {number} is worse: {found}")
        if arguments.resume:
            with arguments.resume.open("a") as file:
                file.write(msgspec.json.encode((number, found)).decode() + "\n")
    text = page(list(outcomes.values()), arguments.profiles)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
