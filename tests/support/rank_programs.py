"""Random programs for ranks, and the check that they end under every rule of `nccl_rules`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from pipecompile.ir import HOST, LOSS, Program, Route, Tie, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.passes import lower
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names
from tests.support.nccl_rules import FakeWorld, Launched, Queue, add_collectives, add_departures, add_ties, execute

__all__ = ["RankProgram", "check", "drawn_program", "launches_of"]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A program with what goes between ranks beside it: ties, samples per micro-batch, copies of the pipeline."""

    schedule: str
    program: Program
    sizes: tuple[int, ...]
    ties: tuple[Tie, ...]
    copies: int
    is_sharded: bool

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what the program has beside a chain of even micro-batches."""
        found = {
            "skips": any(route.skips for route in self.program.routes),
            "ties": bool(self.ties),
            "uneven micro-batches": len(set(self.sizes)) > 1,
            "copies": self.copies > 1 and not self.is_sharded,
            "sharded copies": self.copies > 1 and self.is_sharded,
        }
        return tuple(name for name, has in found.items() if has)


def drawn_program(seed: int, schedule: str | None = None) -> RankProgram:
    """Return a program of a schedule of the catalogue on 2 to 8 ranks. Equal seeds give equal programs."""
    random = Random(seed)
    name = schedule or random.choice([*compared_names(), "forward"])
    n_devices = random.randint(2, 8)
    is_looped = "interleaved" in name or "looped" in name
    chunks = CATALOGUE[name].chunks or (random.randint(2, 3) if is_looped else 1)
    count = random.randint(1, 6)
    order = build_schedule(name, n_devices * chunks, count, n_devices=n_devices)
    if random.random() < 0.3:
        order = split_backward(order, random.choice([0, 1, 3]))
    checkpoint = random.choice(["never", "never", "always", "except_last"])
    routes = (Route("x", HOST, (0,)), *chain(order.n_stages), *_skips(random, order.n_stages))
    loss = Route(LOSS, order.n_stages - 1, (HOST,), gradient=name != "forward")
    program = lower(
        order if checkpoint == "never" or random.random() < 0.7 else advance_recompute(order, 1),
        (*routes, loss), checkpoint=checkpoint, receive_ahead=random.choice([0, 0, 0, 1, 2, 99]), overlap=True,
    )  # fmt: skip
    stages = range(order.n_stages)
    ties = [Tie(f"w{i}", tuple(sorted(random.sample(stages, random.randint(2, 3) % len(stages) or 2))))
            for i in range(random.choice([0, 0, 1, 2]))]  # fmt: skip
    copies = random.choice([1, 1, 2, 3])
    sizes = tuple(3 - (place >= random.randint(1, count)) for place in range(count))
    return RankProgram(name, program, sizes, tuple(ties), copies, random.random() < 0.5)


def _skips(random: Random, n_stages: int) -> list[Route]:
    """Return up to three values that skip stages, fan out, or go to all ranks at the end."""
    routes = []
    for index in range(random.choice([0, 1, 1, 2, 3])):
        source = random.randrange(n_stages)
        ends = [*range(source + 1, n_stages), HOST]
        chosen = set(random.sample(ends, random.randint(1, min(3, len(ends)))))
        consumers = tuple(end for end in ends if end in chosen)
        routes.append(Route(f"skip{index}", source, consumers, gradient=HOST not in chosen and random.random() < 0.8))
    return routes


@without_collection
def check(drawn: RankProgram) -> int:
    """Launch a program on all ranks of all copies and run it under every rule. Return the launches. Raises Deadlock or AssertionError."""
    worlds = _worlds(drawn)
    rows = _rows(worlds)
    for queue in Queue:
        for is_buffered, is_first_step in ((False, False), (False, True), (True, False)):
            execute(rows, queue, is_buffered=is_buffered, is_first_step=is_first_step)
    execute(rows, Queue.STREAMS, is_buffered=True, seed=len(rows))
    assert sum(world.computed for world in worlds) > 0
    return sum(map(len, rows.values()))


def launches_of(drawn: RankProgram) -> dict[Hashable, list[Launched]]:
    """Return the launches of all ranks of all copies."""
    return _rows(_worlds(drawn))


def _worlds(drawn: RankProgram) -> list[FakeWorld]:
    worlds = [FakeWorld(drawn.program, drawn.sizes, copy) for copy in range(drawn.copies)]
    for world in worlds:
        add_departures(world)
        add_ties(world, drawn.ties)
    if drawn.copies > 1:
        add_collectives(worlds, is_sharded=drawn.is_sharded)
    return worlds


def _rows(worlds: Sequence[FakeWorld]) -> dict[Hashable, list[Launched]]:
    return {rank: row for world in worlds for rank, row in world.rows.items()}
