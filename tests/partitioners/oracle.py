"""An oracle for the solver: the objective from its definition, brute force over all assignments, and random problems."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import coarsen

SMALL = st.one_of(st.integers(0, 9).map(float), st.floats(0.0, 9.0).map(lambda x: round(x, 3)))


def loads_of(
    problem: Problem, stage_of: Mapping[str, int], n_stages: int, recompute: Sequence[bool] | None = None
) -> list[tuple[float, float]]:
    """Return (load, memory) of every device."""
    device = problem.placement or tuple(range(n_stages))
    recompute = recompute or (False,) * n_stages
    return [_of_device(problem, stage_of, device, recompute, d) for d in range(devices_of(problem, n_stages))]


def _of_device(
    problem: Problem, stage_of: Mapping[str, int], device: Sequence[int], recompute: Sequence[bool], d: int
) -> tuple[float, float]:
    device_by_node = {name: device[stage] for name, stage in stage_of.items()}
    here = [node for node in problem.nodes if device_by_node[node.name] == d]
    compute = sum(node.time + node.forward * recompute[stage_of[node.name]] for node in here)
    compute /= problem.speed[d] if problem.speed else 1.0
    sent = received = inbox = 0.0
    for tensor in problem.tensors:
        home = device_by_node[tensor.source]
        readers = {device_by_node[name] for name in tensor.consumers} - {home}
        if home == d and readers:
            costs = [tensor.time * factor(problem, d, other) for other in readers]
            sent += max(costs) if problem.multicast else sum(costs)
        if d in readers:
            received += tensor.time * factor(problem, home, d)
        stages = {stage_of[name] for name in tensor.consumers} - {stage_of[tensor.source]}
        inbox += sum(tensor.bytes * in_flight(problem, s) for s in stages if device[s] == d)
    memory = inbox + sum(node.bytes for node in here)
    for node in here:
        s = stage_of[node.name]
        memory += node.activation * (1.0 if recompute[s] else in_flight(problem, s))
    memory += sum(shared.bytes for shared in problem.shared if any(device_by_node[name] == d for name in shared.nodes))
    return (max(compute, sent, received) if problem.overlap else compute + sent + received, memory)


def devices_of(problem: Problem, n_stages: int) -> int:
    lists = [problem.speed, problem.memory_limit, problem.links]
    counts = [len(values) for values in lists if isinstance(values, tuple)]
    return max([*counts, 1 + max(problem.placement or (n_stages - 1,))])


def factor(problem: Problem, source: int, target: int) -> float:
    return problem.links[source][target] if problem.links else 1.0


def in_flight(problem: Problem, stage: int) -> float:
    return problem.in_flight[stage] if problem.in_flight else 1.0


def legal_assignments(problem: Problem, n_stages: int) -> Iterator[dict[str, int]]:
    names = [node.name for node in problem.nodes]
    choices = [[problem.pins[name]] if name in problem.pins else range(n_stages) for name in names]
    for stages in itertools.product(*choices):
        stage_of = dict(zip(names, stages, strict=True))
        ordered = all(stage_of[a] <= stage_of[b] for a, b in problem.precedence)
        ordered = ordered and all(stage_of[a] < stage_of[b] for a, b in problem.apart)
        if ordered and all(len({stage_of[name] for name in group}) <= 1 for group in problem.groups):
            yield stage_of


def choices_of(problem: Problem, n_stages: int) -> list[tuple[bool, ...]]:
    """Return every choice of stages that recompute."""
    if problem.recompute == "auto":
        return list(itertools.product((False, True), repeat=n_stages))
    return [problem.recompute or (False,) * n_stages]


def limits_of(problem: Problem, n_stages: int) -> list[float]:
    n = devices_of(problem, n_stages)
    limits = problem.memory_limit if isinstance(problem.memory_limit, tuple) else (problem.memory_limit,) * n
    return [inf if limit is None else limit for limit in limits]


def brute_force(problem: Problem, n_stages: int) -> tuple[float, float]:
    """Return the least bottleneck (infinite if nothing fits) and the least amount, in bytes, by which all limits must grow
    (infinite if no assignment is legal).
    """
    room = limits_of(problem, n_stages)
    best = excess = inf
    for stage_of in legal_assignments(problem, n_stages):
        for recompute in choices_of(problem, n_stages):
            rows = loads_of(problem, stage_of, n_stages, recompute)
            excess = min(excess, max(memory - limit for (_, memory), limit in zip(rows, room, strict=True)))
            if all(memory <= limit * (1 + 1e-9) for (_, memory), limit in zip(rows, room, strict=True)):
                best = min(best, max(load for load, _ in rows))
    return best, excess


# -- random problems ------------------------------------------------------------------------------------------------


@st.composite
def problems(
    draw: st.DrawFn, *, memory: bool = True, multicast: bool | None = None, max_nodes: int = 9, rich: bool = True,
    direct: bool = False, constrained: bool = True,
) -> tuple[Problem, int]:  # fmt: skip
    """Draw a problem and a number of stages, small enough to try all assignments.

    Half of them have only the fields of the reference problems. `rich` allows the other fields, `direct` only those with
    which every stage is a device of its own and all links are alike, `constrained` pins and pairs apart.
    """
    n_stages = draw(st.integers(1, 4))
    n = draw(st.integers(1, min(max_nodes, {1: 12, 2: 12, 3: 7, 4: 5}[n_stages])))
    names = draw(st.permutations([f"v{i}" for i in range(n)]))
    pairs = list(itertools.combinations(names, 2))
    more = rich and draw(st.booleans())
    n_devices = n_stages if direct or not more else draw(st.integers(1, n_stages))
    per = lambda count, numbers: st.one_of(st.none(), st.tuples(*[numbers] * count))  # noqa: E731
    fields: dict[str, Any] = {}
    if more:
        fields = draw(_placement(n_stages, n_devices, direct=direct))
        fields |= draw(_constraints(names, pairs, n_stages)) if constrained else {}
    sizes = SMALL if memory else st.just(0.0)
    nodes = tuple(draw(_node(f"v{i}", sizes, full=more)) for i in range(n))
    crossing = tuple(draw(st.lists(tensors(names, sizes if more else st.just(0.0)), max_size=7))) if pairs else ()
    shared = ()
    if more and memory:
        users = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
        shared = tuple(draw(st.lists(st.builds(lambda u, b: Shared(tuple(u), b), users, SMALL), max_size=2)))
        fields["recompute"] = draw(st.one_of(st.just("auto"), per(n_stages, st.booleans())))
    total = sum(node.bytes + node.activation for node in nodes) + sum(tensor.bytes for tensor in crossing)
    limit = st.floats(0.2, 1.3).map(lambda share: round(share * total, 2))
    return Problem(
        nodes=nodes,
        precedence=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2 * n, unique=True))) if pairs else (),
        tensors=crossing,
        groups=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2))) if pairs else (),
        memory_limit=draw(st.one_of(st.none(), limit, st.tuples(*[limit] * n_devices))) if memory else None,
        in_flight=draw(per(n_stages, st.integers(1, 4).map(float))) if memory else None,
        multicast=draw(st.booleans()) if multicast is None else multicast,
        overlap=draw(st.booleans()),
        speed=draw(per(n_devices, st.sampled_from([0.5, 1.0, 2.0, 3.0]))),
        shared=shared,
        **fields,
    ), n_stages


@st.composite
def _node(draw: st.DrawFn, name: str, sizes: st.SearchStrategy[float], *, full: bool) -> Node:
    time = draw(SMALL)
    forward = round(time * draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])), 3) if full else 0.0
    return Node(name, time, draw(sizes), draw(sizes), min(forward, time))


@st.composite
def _placement(draw: st.DrawFn, n_stages: int, n_devices: int, *, direct: bool) -> dict[str, Any]:
    """Draw a placement that uses every device, and links."""
    if direct:
        return {}
    placement = draw(st.permutations([s % n_devices for s in range(n_stages)]))
    factors = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    links = st.one_of(st.none(), st.tuples(*[st.tuples(*[factors] * n_devices)] * n_devices))
    return {"placement": tuple(placement), "links": draw(links)}


@st.composite
def _constraints(draw: st.DrawFn, names: list[str], pairs: list[tuple[str, str]], n_stages: int) -> dict[str, Any]:
    pins = draw(st.dictionaries(st.sampled_from(names), st.integers(0, n_stages - 1), max_size=2))
    return {"pins": pins, "apart": tuple(draw(st.lists(st.sampled_from(pairs), max_size=1))) if pairs else ()}


@st.composite
def tensors(draw: st.DrawFn, names: list[str], sizes: st.SearchStrategy[float]) -> Tensor:
    source, *consumers = draw(st.lists(st.sampled_from(names), min_size=2, max_size=4, unique=True))
    return Tensor(source, tuple(consumers), draw(SMALL), draw(sizes))


@st.composite
def dense_blocks(draw: st.DrawFn) -> tuple[Problem, int]:
    """Draw a chain in which later nodes consume earlier ones again, as in a dense block; a sender pays per receiver or once."""
    n = draw(st.integers(4, 8))
    names = [f"v{i}" for i in range(n)]
    nodes = tuple(Node(name, draw(st.integers(1, 4).map(float))) for name in names)
    pairs = tuple(itertools.pairwise(names))
    crossing = []
    for place, name in enumerate(names[:-1]):
        readers = draw(st.lists(st.sampled_from(names[place + 1 :]), min_size=1, unique=True))
        crossing.append(Tensor(name, tuple(readers), draw(st.integers(0, 3).map(float))))
    return Problem(nodes, pairs, tuple(crossing), multicast=draw(st.booleans())), draw(st.integers(2, 4))


def leaves(count: int, tensor: float) -> Problem:
    """Return nodes of 2 seconds each that read one root of 2 seconds: a stage without the root receives, and that of the root sends."""
    names = [f"n{i}" for i in range(count)]
    return Problem(
        (Node("root", 2.0), *(Node(name, 2.0) for name in names)),
        precedence=tuple(("root", name) for name in names),
        tensors=(Tensor("root", tuple(names), tensor),),
    )


@st.composite
def degenerate_problems(draw: st.DrawFn) -> tuple[Problem, int]:
    """Draw a problem in which much is equal, zero or missing: parallel towers of equal nodes into one head, isolated nodes, nodes
    and tensors of equal or no cost at any scale, fewer nodes than stages.
    """
    n_stages = draw(st.integers(1, 4))
    n_towers, depth = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (2, 3), (5, 1), (4, 1), (1, 5)]))
    scale = draw(st.sampled_from([0.0, 1.0, 1e-12, 1e9]))
    time = st.sampled_from([0.0, scale]) if draw(st.booleans()) else st.just(scale)
    towers = [[f"t{i}.{j}" for j in range(depth)] for i in range(n_towers)]
    heads = ["head"] * draw(st.booleans())
    isolated = [f"lone{i}" for i in range(draw(st.integers(0, 1)))]
    pairs = [pair for tower in towers for pair in itertools.pairwise([*tower, *heads])]
    sent = draw(st.sampled_from([0.0, scale, scale / 2]))
    crossing = tuple(Tensor(a, (b,), sent, sent) for a, b in pairs) if draw(st.booleans()) else ()
    names = [*(name for tower in towers for name in tower), *heads, *isolated]
    size = draw(st.sampled_from([0.0, scale]))
    nodes = tuple(Node(name, draw(time), size, size) for name in names)
    limit = draw(st.sampled_from([None, 0.0, 2 * size, len(names) * size]))
    return Problem(nodes, tuple(pairs), crossing, memory_limit=limit, multicast=draw(st.booleans())), n_stages


# -- windows --------------------------------------------------------------------------------------------------------


def check_inside(problem: Problem, n_stages: int, target: float, windows: StageWindows) -> None:
    """Assert that every cut with a bottleneck of at most `target` lies inside the windows."""
    clusters = coarsen(problem)
    for stage_of in legal_assignments(problem, n_stages):
        assignment = np.array([stage_of[names[0]] for names in clusters.members])
        for recompute in choices_of(problem, n_stages):
            rows = zip(loads_of(problem, stage_of, n_stages, recompute), limits_of(problem, n_stages), strict=True)
            if all(load <= target and memory <= limit for (load, memory), limit in rows):
                assert ((windows.earliest <= assignment) & (assignment <= windows.latest)).all()
                assert all(assignment[a] < assignment[b] for a, b in windows.strict_pairs)
