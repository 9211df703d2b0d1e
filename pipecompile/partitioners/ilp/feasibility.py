"""Feasibility: whether some cut fits in memory, and the least amount by which every memory limit must grow otherwise.

    minimise excess    subject to    memory(d) <= limit(d) + excess    for every device d, precedence and user constraints

An excess above 0, proven by the solver, proves that no cut fits, and says how much more memory would suffice. Flows cost no
time here. The problem without times is called the *memory problem*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from time import monotonic

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.memory_rows import MemoryRows
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip, OutOfTimeError
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import TrafficRows
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE, LoadTracker, fits
from pipecompile.partitioners.verify import memory_text

__all__ = ["find_fitting_cut"]

HALVINGS = 40
"""Bisection steps on the excess of a linear order."""

ROUNDING = 1e-7
"""Share of an excess that is not worth a further cut."""

PROOF_SHARE = 0.7
"""Share of the seconds left for the least excess where it is proven that no cut fits; the rest is for the remedies."""

SMALL = 100
"""Clusters up to which the search along orders takes a second at most, and runs to its end after the deadline."""


def find_fitting_cut(clusters: Clusters, machine: Machine, deadline: float) -> list[int]:
    """Return a cut that fits in memory.

    Raise InfeasibleError, with the least limit that works, if it is proven that no cut fits; PartitionError if neither is
    known at the deadline. A large problem keeps the deadline but for the first cut of an order.
    """
    memory_problem = replace(clusters, flows=tuple(replace(flow, time=0.0) for flow in clusters.flows if flow.bytes))
    bound = _trivial_excess_bound(memory_problem, machine)
    last = inf if len(clusters) <= SMALL else deadline
    best = _cut_of_least_excess(memory_problem, machine, bound, last)
    excess = inf if best is None else _excess(memory_problem, machine, best)
    if (best is None or (not _fits(memory_problem, machine, best) and excess > bound)) and monotonic() < last:
        now, share = monotonic(), PROOF_SHARE if best is not None and bound > 0 else 1.0
        best, bound = _minimise_excess(memory_problem, machine, best, bound, now + share * (deadline - now))
    if best is not None and _fits(memory_problem, machine, best):
        return best
    if best is None or bound <= TOLERANCE * min(machine.memory_limit):
        raise _undecided(memory_problem, machine, best, deadline)
    raise _infeasible(memory_problem, machine, best, bound, last)


def _cut_of_least_excess(clusters: Clusters, machine: Machine, bound: float, deadline: float) -> list[int] | None:
    """Return the cut of the candidate orders with the least excess, which is at least `bound`; after the deadline the least so far.

    An order is bisected only if it has a cut with less excess than those before.
    """
    best, high, ranges = None, inf, stage_ranges(clusters, len(machine))
    for order in candidate_orders(clusters, ranges):
        if best is not None and (high - bound <= ROUNDING * high or monotonic() > deadline):
            break
        cut = cut_order(clusters, _with_excess(machine, high * (1 - ROUNDING)), order, ranges)
        if cut is not None and _excess(clusters, machine, cut) < high:
            best = _bisected(clusters, machine, order, cut, bound, deadline)
            high = max(_excess(clusters, machine, best), 0.0)
    return best


def _bisected(
    clusters: Clusters, machine: Machine, order: Sequence[int], best: list[int], low: float, deadline: float
) -> list[int]:
    """Return the cut of an order with the least excess, by bisection between `low` and the excess of the cut `best`."""
    ranges = stage_ranges(clusters, len(machine))
    high = max(_excess(clusters, machine, best), 0.0)
    for _ in range(HALVINGS):
        if high - low <= ROUNDING * high or monotonic() > deadline:
            break
        middle = (low + high) / 2
        cut = cut_order(clusters, machine.with_extra_memory(middle), order, ranges)
        if cut is not None and _excess(clusters, machine, cut) < high:
            best, high = cut, max(_excess(clusters, machine, cut), 0.0)
        else:
            low = middle
    return best


def _with_excess(machine: Machine, excess: float) -> Machine:
    """Return the machine with limits that grow by `excess` bytes, which may be infinite."""
    unlimited = (inf,) * len(machine.memory_limit)
    return replace(machine, memory_limit=unlimited) if excess == inf else machine.with_extra_memory(excess)


def _excess(clusters: Clusters, machine: Machine, cut: Sequence[int]) -> float:
    """Return the largest memory of a device beyond its limit, in bytes; negative if the cut fits."""
    loads = LoadTracker(clusters, machine, cut).device_loads()
    return max(load.memory - limit for load, limit in zip(loads, machine.memory_limit, strict=True))


def _fits(clusters: Clusters, machine: Machine, cut: Sequence[int]) -> bool:
    loads = LoadTracker(clusters, machine, cut).device_loads()
    return all(fits(load.memory, limit) for load, limit in zip(loads, machine.memory_limit, strict=True))


def _memory_alone(clusters: Clusters, machine: Machine, cluster: int, stage: int) -> float:
    """Return the bytes of a stage with this cluster alone, without the tensors that it receives."""
    in_flight = machine.in_flight[stage]
    recomputes = machine.recompute[stage] is True or (machine.recompute[stage] is None and in_flight > 1)
    return clusters.bytes[cluster] + clusters.activation[cluster] * (1.0 if recomputes else in_flight)


def _trivial_excess_bound(clusters: Clusters, machine: Machine) -> float:
    """Return a lower bound of the excess: of the largest cluster alone, and of all clusters shared evenly."""
    stages, limit = range(len(machine)), [machine.memory_limit[d] for d in machine.device_of]
    alone = max(min(_memory_alone(clusters, machine, v, s) - limit[s] for s in stages) for v in range(len(clusters)))
    total = sum(min(_memory_alone(clusters, machine, v, s) for s in stages) for v in range(len(clusters)))
    devices = set(machine.device_of)
    return max(alone, (total - sum(machine.memory_limit[d] for d in devices)) / len(devices), 0.0)


# -- the integer program --------------------------------------------------------------------------------------------


def _minimise_excess(
    clusters: Clusters, machine: Machine, best: list[int] | None, bound: float, deadline: float
) -> tuple[list[int] | None, float]:
    """Solve the integer program; return the best cut and the lower bound of the excess, in bytes."""
    most = _excess(clusters, machine, best) if best is not None else _total_memory(clusters, machine)
    max_limit = max(limit for limit in machine.memory_limit if isfinite(limit)) + most
    unit = max_limit or 1.0
    windows = compute_windows(clusters, machine.with_extra_memory(most), inf, deadline)
    if windows.is_empty:
        return best, bound
    try:
        steps, excess = _excess_model(clusters, machine, windows, (bound, most), unit, max_limit, deadline)
    except OutOfTimeError:
        return best, bound
    result = steps.mip.minimise(excess, deadline - monotonic())
    if result.values is not None:
        cut = steps.assignment(result.values)
        best = cut if best is None else min(best, cut, key=lambda cut: _excess(clusters, machine, cut))
    if best is None:
        return None, bound
    return best, max(bound, min(result.bound * unit, _excess(clusters, machine, best)))


def _excess_model(
    clusters: Clusters, machine: Machine, windows: StageWindows, bounds: tuple[float, float], unit: float,
    max_limit: float, deadline: float,
) -> tuple[StepVariables, LinearExpr]:  # fmt: skip
    """Return the step variables of the program, and the excess to minimise, in `unit` bytes."""
    mip = Mip(deadline)
    steps = StepVariables(mip, windows.earliest.tolist(), windows.latest.tolist())
    boundaries = range(-1, len(machine))
    steps.add_monotonicity(range(len(clusters)), boundaries)
    steps.add_precedence(transitive_reduction(clusters), windows.strict_pairs, boundaries)
    excess = mip.add_variable(bounds[0] / unit, bounds[1] / unit)
    traffic = TrafficRows(steps, clusters, machine, ConsumerCounts(clusters, windows), 1.0)
    memory = MemoryRows(steps, clusters, machine, traffic, inf, unit, max_limit)
    for d, limit in enumerate(machine.memory_limit):
        if isfinite(limit):
            mip.add_row(excess + limit / unit, memory.memory(d))
    return steps, excess


def _total_memory(clusters: Clusters, machine: Machine) -> float:
    """Return an upper bound of the memory of one device: all clusters, all flows and all shared bytes."""
    in_flight = max(1.0, *machine.in_flight)
    permanent = sum(clusters.bytes) + sum(size for _, size in clusters.shared)
    flows = sum(flow.bytes * len(flow.consumers) for flow in clusters.flows)
    return permanent + in_flight * (sum(clusters.activation) + flows)


# -- the message ----------------------------------------------------------------------------------------------------


def _undecided(clusters: Clusters, machine: Machine, best: Sequence[int] | None, deadline: float) -> PartitionError:
    """Return the error of a search that finds neither a cut that fits nor the proof that there is none."""
    what = f"no cut into {_stages_text(machine)} that fits in memory was found"
    if best is None or monotonic() >= deadline:
        return PartitionError(f"{what} within the time limit", why="nor is it proven that none exists",
                              hint="a larger time_limit, or a larger memory_limit")  # fmt: skip
    excess = _excess(clusters, machine, best)
    limits = [_number(limit + excess) for limit in machine.memory_limit]
    listed = limits[0] if len(set(limits)) == 1 else f"({', '.join(limits)})"
    return PartitionError(
        what, why=f"the best exceeds its limit by {memory_text(excess)}, so few that rounding hides whether another fits",
        hint=f"memory_limit={listed}",
    )  # fmt: skip


def _infeasible(
    clusters: Clusters, machine: Machine, best: Sequence[int], bound: float, deadline: float
) -> InfeasibleError:
    loads = LoadTracker(clusters, machine, best).device_loads()
    excess = _excess(clusters, machine, best)
    binding = max(range(len(loads)), key=lambda d: loads[d].memory - machine.memory_limit[d])
    memory, limit = loads[binding].memory, machine.memory_limit[binding]
    is_exact = excess - bound <= 1e-6 * max(load.memory for load in loads)
    growth = memory_text(excess) if is_exact else f"at least {memory_text(bound)}; {memory_text(excess)} are enough"
    unit = "stage" if machine.is_one_to_one else "device"
    too_large = _cluster_too_large(clusters, machine)
    return InfeasibleError(
        f"no cut into {_stages_text(machine)} fits in memory",
        where=too_large or f"{unit} {binding} would hold {memory_text(memory)}, its limit is {memory_text(limit)}",
        why=f"proven: every limit must grow by {growth}",
        hint=", or ".join(_remedies(clusters, machine, memory, excess, deadline)),
    )


def _remedies(clusters: Clusters, machine: Machine, memory: float, excess: float, deadline: float) -> list[str]:
    """Return options with which a cut fits: larger limits, and if they are found by the deadline more stages, recomputation."""
    if len(set(machine.memory_limit)) == 1:
        remedies = [f"memory_limit={_number(memory)}"]
    else:
        remedies = [f"memory_limit=({', '.join(_number(limit + excess) for limit in machine.memory_limit)})"]
    if machine.is_uniform and (n_stages := _enough_stages(clusters, machine, deadline)):
        remedies.append(f"n_stages={n_stages}")
    free = replace(machine, recompute=tuple(required or None for required in machine.recompute))
    if free != machine and (cut := _fitting_cut_of_orders(clusters, free, deadline)) is not None:
        stages = [s for s, recomputes in enumerate(LoadTracker(clusters, free, cut).recompute()) if recomputes]
        listed = f"stage{'s' * (len(stages) != 1)} {', '.join(map(str, stages))}"
        remedies.append(f'recompute="auto": a cut fits if {listed} recompute{"s" * (len(stages) == 1)}')
    return remedies


def _cluster_too_large(clusters: Clusters, machine: Machine) -> str:
    """Describe the first cluster that no stage can hold even alone; empty if there is none."""
    limit = [machine.memory_limit[d] for d in machine.device_of]
    for v, names in enumerate(clusters.members):
        if not any(fits(_memory_alone(clusters, machine, v, s), limit[s]) for s in range(len(machine))):
            need = min(_memory_alone(clusters, machine, v, s) for s in range(len(machine)))
            listed = ", ".join(map(repr, names))
            subject = f"node {listed}" if len(names) == 1 else f"nodes {listed}, which share a stage"
            return f"{subject}: {memory_text(need)} alone, the largest limit is {memory_text(max(limit))}"
    return ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _stages_text(machine: Machine) -> str:
    return f"{len(machine)} stage" + "s" * (len(machine) != 1)


def _fitting_cut_of_orders(clusters: Clusters, machine: Machine, deadline: float) -> list[int] | None:
    """Return a cut of a candidate order that fits in memory; None if there is none, or none is found by the deadline."""
    ranges = stage_ranges(clusters, len(machine))
    for order in candidate_orders(clusters, ranges):
        if monotonic() > deadline:
            break
        cut = cut_order(clusters, machine, order, ranges)
        if cut is not None and _fits(clusters, machine, cut):
            return cut
    return None


def _enough_stages(clusters: Clusters, machine: Machine, deadline: float) -> int | None:
    """Return the least number of stages with which a cut of a candidate order fits; None if none does by the deadline.

    The number of further stages doubles until a cut fits; then it is bisected.
    """
    low, more, most = len(machine), 1, len(clusters) + len(machine)
    while _fitting_cut_of_orders(clusters, machine.with_stages(high := min(low + more, most)), deadline) is None:
        if high == most or monotonic() > deadline:
            return None
        low, more = high, 2 * more
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = _fitting_cut_of_orders(clusters, machine.with_stages(middle), deadline) is not None
        low, high = (low, middle) if is_enough else (middle, high)
    return high
