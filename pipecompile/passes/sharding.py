"""Sharding: a stage has its parameters from one block before a block of its actions to its end, and its gradients are summed once.

    before   0F0 0F1 │ 2F0 2F1 2B0 2B1 │ 0B0 0B1                                       three blocks of one device
    after    0UNSHARD 2UNSHARD 0F0 0F1 │ 2F0 2F1 2B0 2B1 │ 2RESHARD 2REDUCE_GRAD 0B0 0B1 │ 0RESHARD 0REDUCE_GRAD
    ahead=0  0UNSHARD 0F0 0F1 │ 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 │ 2RESHARD 0UNSHARD 2REDUCE_GRAD 0B0 0B1 │ ...

A block is a longest run of actions of the same stages. UNSHARD comes one block ahead, so that the collective runs beside that
block. `insert_sharding` frees all that the next block does not use, as FSDP does (Zhao et al., "PyTorch FSDP: Experiences on
Scaling Fully Sharded Data Parallel", 2023). `shard_to_fit` frees as little as a limit demands, and of all that is idle what is used
last, as Belady's rule evicts pages. An UNSHARD goes before a REDUCE_GRAD at the same place: a block waits for the one, the end of
the step for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import SHARDING, UNTRAINED, Action, Kind, Route, Schedule
from pipecompile.ir.directions import check_one_direction
from pipecompile.ir.overlap import grouped
from pipecompile.passes.memory_fit import check_schedule, checked_stages, does_not_fit, first_over
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.simulator import simulate
from pipecompile.text.input_checks import amounts, whole

__all__ = ["insert_sharding", "shard_to_fit"]

_OF_ONE = "an UNSHARD, a RESHARD and a REDUCE_GRAD are of one"

_ADDING = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
_WITHOUT_PARAMETERS = (*SHARDING, Kind.OFFLOAD, Kind.RELOAD)


def insert_sharding(schedule: Schedule, stages: Collection[int] | None = None, *, ahead: int = 1) -> Schedule:
    """Return the schedule with UNSHARD, RESHARD and REDUCE_GRAD for these stages, by default for all, each gathered as briefly as can be.

    UNSHARD comes `ahead` blocks before the block that needs it, and a stage stays gathered that the next `ahead` blocks need. Stages with
    such actions stay as they are. Raise InputError if an argument has another type, ScheduleError if a stage
    does not exist or stages have several copies, and VerifyError if the schedule is not legal.
    """
    check_schedule(schedule, None)
    check_one_direction(schedule, _OF_ONE)
    wanted = frozenset(range(schedule.n_stages)) if stages is None else checked_stages(stages, schedule.n_stages)
    rows = _residences(schedule, wanted, whole("ahead", ahead, 0))
    for row in rows:
        row.kept.clear()
    return _inserted(schedule, rows)


def shard_to_fit(
    schedule: Schedule,
    memory_limit: float | Sequence[float],
    *,
    routes: Sequence[Route] | None = None,
    **costs: Unpack[CostOptions],
) -> Schedule:
    """Return the schedule with UNSHARD, RESHARD and REDUCE_GRAD for all stages, gathered as rarely as `memory_limit` allows.

    Without need a stage is gathered once, and freed after its last action. `memory_limit` is in bytes, one number or one per device; it
    counts what `simulate` counts with these costs: gathered parameters, gradients, what stages save, and `parameter_bytes`, here of the
    shards. Raise InfeasibleError if nothing more can be freed, InputError if `schedule` is not a Schedule or a cost or limit is not a
    number, ScheduleError if stages have several copies, and VerifyError if the schedule is not legal.
    """
    check_schedule(schedule, routes)
    check_one_direction(schedule, _OF_ONE)
    limit = amounts("memory_limit", memory_limit, schedule.n_devices, "device")
    if costs.get("unsharded_bytes") is None:
        why, hint = "without it no parameter takes memory", "unsharded_bytes=[...] per stage"
        raise InputError("unsharded_bytes is missing", why=why, hint=hint)
    rows = _residences(schedule, frozenset(range(schedule.n_stages)), 1)
    while True:
        candidate = _inserted(schedule, rows)
        timeline = simulate(candidate, routes=routes, **costs)
        times = [first_over(curve, most) for curve, most in zip(timeline.memory, limit, strict=True)]
        over = [(device, when) for device, when in enumerate(times) if when is not None]
        if not over:
            return candidate
        for device, when in over:
            n_begun = sum(span.start <= when for span in timeline.compute(device))
            if not rows[device].free(n_begun):
                peak, why = timeline.peak_memory[device], "no parameter is gathered that the next action does not use"
                raise does_not_fit(device, peak, limit[device], why, "more stages, or smaller micro-batches")


def _residences(schedule: Schedule, wanted: Collection[int], ahead: int) -> list[_Residence]:
    """Return, per device, when it keeps the parameters of the wanted stages that have no action on parameters yet."""
    stages = frozenset(wanted) - {a.stage for row in schedule.rows for a in row if a.kind in SHARDING}
    return [_Residence(tuple(grouped(row, schedule.overlaps)), stages, ahead) for row in schedule.rows]


def _inserted(schedule: Schedule, rows: Sequence[_Residence]) -> Schedule:
    is_trained = any(action.kind not in UNTRAINED for row in schedule.rows for action in row)
    new = tuple(tuple(action for action, _ in row.actions(is_trained=is_trained)) for row in rows)
    return schedule if new == schedule.rows else replace(schedule, rows=new, certificate=None)


@dataclass(frozen=True, slots=True)
class _Block:
    """The cells of a row up to number `stop`, from that of the block before, which use the parameters of `stages`."""

    stages: frozenset[int]
    stop: int


def _blocks(cells: Sequence[Sequence[Action]], wanted: frozenset[int]) -> list[_Block]:
    """Return the blocks of a row. Cells that use no parameters of the wanted stages belong to the block before."""
    blocks: list[_Block] = []
    for index, cell in enumerate(cells):
        stages = wanted & {action.stage for action in cell if action.kind not in _WITHOUT_PARAMETERS}
        if blocks and (not stages or stages == blocks[-1].stages):
            blocks[-1] = replace(blocks[-1], stop=index + 1)
        else:
            blocks.append(_Block(stages, index + 1))
    return blocks


class _Residence:
    """The blocks of a device during which it keeps the parameters of its stages gathered.

    During a block the stages of the next `ahead` blocks are gathered too. `kept` has (stage, block, later block) for each pair of blocks,
    one the next that uses the stage, between which it stays. `cells` are those of the row: one action, or two that overlap.
    """

    def __init__(self, cells: Sequence[Sequence[Action]], wanted: frozenset[int], ahead: int) -> None:
        self.cells, self.wanted, self.ahead = cells, wanted, ahead
        self.blocks = _blocks(cells, wanted)
        uses: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for stage in block.stages:
                uses.setdefault(stage, []).append(index)
        self.kept = {(stage, *pair) for stage, places in uses.items() for pair in pairwise(places)}

    def free(self, n_begun: int) -> bool:
        """Free, in the block of the last of `n_begun` actions of the new row, the idle stage that is used last. If there is none, come
        less early. Return whether anything has changed.
        """
        places = [block for _, block in self.actions(is_trained=True)]
        here = places[min(max(n_begun, 1), len(places)) - 1]
        idle = [(after, stage, before) for stage, before, after in self.kept if before < here < after - self.ahead]
        if idle:
            after, stage, before = max(idle)
            self.kept.remove((stage, before, after))
        elif self.ahead:
            self.ahead -= 1
        else:
            return False
        return True

    def actions(self, *, is_trained: bool) -> Iterator[tuple[Action, int]]:
        """Yield the actions of the new row, each with its block. What comes between two blocks belongs to the later one."""
        ends = {block.stop: index + 1 for index, block in enumerate(self.blocks)}
        reduced, gathered = self._reduced() if is_trained else {}, set[int]()
        yield from ((action, 0) for action in self._moved(gathered, 0))
        block = 0
        for index, cell in enumerate(self.cells):
            yield from ((action, block) for action in cell)
            if (following := ends.get(index + 1)) is not None:
                block = following
                yield from ((action, block) for action in self._moved(gathered, block))
            yield from ((Action(stage, Kind.REDUCE_GRAD), block) for stage in reduced.get(index, ()))

    def _moved(self, gathered: set[int], block: int) -> Iterator[Action]:
        """Yield the RESHARDs and UNSHARDs before a block, and note what is gathered then."""
        following = self.blocks[block : block + self.ahead + 1]
        order = dict.fromkeys(stage for one in following for stage in sorted(one.stages))
        needed = order.keys() | {stage for stage, before, after in self.kept if before < block < after}
        yield from (Action(stage, Kind.RESHARD) for stage in sorted(gathered - needed))
        yield from (Action(stage, Kind.UNSHARD) for stage in order if stage not in gathered)
        gathered.intersection_update(needed)
        gathered.update(order)

    def _reduced(self) -> dict[int, list[int]]:
        """Return, by the number of a cell, the stages whose last gradients it computes."""
        adding = ((i, a.stage) for i, cell in enumerate(self.cells) for a in cell if a.kind in _ADDING)
        last = {stage: index for index, stage in adding if stage in self.wanted}
        ends: dict[int, list[int]] = {}
        for stage, index in last.items():
            ends.setdefault(index, []).append(stage)
        return ends
