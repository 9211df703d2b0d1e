"""The objective once more, written from its definition, every assignment tried, and random problems to try them on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from math import inf

from hypothesis import strategies as st

from pipecompile.partitioners import Node, Problem, Tensor

SMALL = st.one_of(st.integers(0, 9).map(float), st.floats(0.0, 9.0).map(lambda x: round(x, 3)))


def loads_of(problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> list[tuple[float, float]]:
    """(load, memory) of every stage."""
    rows = []
    for s in range(n_stages):
        here = [node for node in problem.nodes if stage_of[node.name] == s]
        compute = sum(node.time for node in here) / (problem.speed[s] if problem.speed else 1.0)
        sent = received = 0.0
        for tensor in problem.tensors:
            readers = {stage_of[name] for name in tensor.consumers}
            if stage_of[tensor.source] != s:
                received += tensor.time if s in readers else 0.0
            elif away := readers - {s}:
                sent += tensor.time if problem.multicast else tensor.time * len(away)
        flying = problem.in_flight[s] if problem.in_flight else 1.0
        memory = sum(node.bytes for node in here) + flying * sum(node.activation for node in here)
        rows.append((max(compute, sent, received) if problem.overlap else compute + sent + received, memory))
    return rows


def legal_assignments(problem: Problem, n_stages: int) -> Iterator[dict[str, int]]:
    names = [node.name for node in problem.nodes]
    for stages in itertools.product(range(n_stages), repeat=len(names)):
        stage_of = dict(zip(names, stages, strict=True))
        ordered = all(stage_of[a] <= stage_of[b] for a, b in problem.precedence)
        if ordered and all(len({stage_of[name] for name in group}) <= 1 for group in problem.groups):
            yield stage_of


def brute_force(problem: Problem, n_stages: int) -> tuple[float, float]:
    """The least bottleneck (infinite when nothing fits) and the least amount by which all limits must grow."""
    limits = problem.memory_limit if isinstance(problem.memory_limit, tuple) else (problem.memory_limit,) * n_stages
    room = [inf if limit is None else limit for limit in limits]
    best = excess = inf
    for stage_of in legal_assignments(problem, n_stages):
        rows = loads_of(problem, stage_of, n_stages)
        excess = min(excess, max(memory - limit for (_, memory), limit in zip(rows, room, strict=True)))
        if all(memory <= limit * (1 + 1e-9) for (_, memory), limit in zip(rows, room, strict=True)):
            best = min(best, max(load for load, _ in rows))
    return best, excess


@st.composite
def problems(
    draw: st.DrawFn, *, memory: bool = True, multicast: bool | None = None, most: int = 9
) -> tuple[Problem, int]:
    """A problem and a number of stages, small enough that all assignments can be tried."""
    n_stages = draw(st.integers(1, 4))
    n = draw(st.integers(1, min(most, {1: 9, 2: 9, 3: 7, 4: 5}[n_stages])))
    names = draw(st.permutations([f"v{i}" for i in range(n)]))
    pairs = list(itertools.combinations(names, 2))
    held = SMALL if memory else st.just(0.0)
    nodes = tuple(Node(f"v{i}", draw(SMALL), draw(held), draw(held)) for i in range(n))
    per_stage = lambda numbers: st.one_of(st.none(), st.tuples(*[numbers] * n_stages))  # noqa: E731
    total = sum(node.bytes + node.activation for node in nodes)
    limit = st.floats(0.2, 1.3).map(lambda share: round(share * total, 2))
    return Problem(
        nodes=nodes,
        precedence=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2 * n, unique=True))) if pairs else (),
        tensors=tuple(draw(st.lists(tensors(names), max_size=7))) if pairs else (),
        groups=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2))) if pairs else (),
        memory_limit=draw(st.one_of(st.none(), limit, st.tuples(*[limit] * n_stages))) if memory else None,
        in_flight=draw(per_stage(st.integers(1, 4).map(float))) if memory else None,
        multicast=draw(st.booleans()) if multicast is None else multicast,
        overlap=draw(st.booleans()),
        speed=draw(per_stage(st.sampled_from([0.5, 1.0, 2.0, 3.0]))),
    ), n_stages


@st.composite
def tensors(draw: st.DrawFn, names: list[str]) -> Tensor:
    source, *consumers = draw(st.lists(st.sampled_from(names), min_size=2, max_size=4, unique=True))
    return Tensor(source, tuple(consumers), draw(SMALL))
