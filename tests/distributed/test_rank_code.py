"""What ranks launch, held to the rules of NCCL by a fake: random programs end, and known traps, put in on purpose, are caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import pipecompile as pc
from pipecompile.distributed import rank_code
from pipecompile.distributed.rank_code import fixed_names
from pipecompile.ir import HOST, LOSS, Instruction, Op, Program, Route, chain
from pipecompile.passes import lower
from pipecompile.passes.lowering import lowering
from pipecompile.passes.sharding import insert_sharding
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import Launch, row_launches
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names
from tests.support.nccl_rules import (
    BOTH_WAYS,
    Deadlock,
    FakeWorld,
    Launched,
    Queue,
    add_collectives,
    add_sharding,
    directed,
    execute,
)
from tests.support.rank_programs import check, drawn_program, launches_of

STRICT = {"queue": Queue.DEVICE, "is_buffered": False}


def built(schedule: str, n_devices: int, count: int, *, meets: bool = True) -> Program:
    """A program with a skip; without `meets` its receives are directly before their readers, as no transport needs them."""
    chunks = CATALOGUE[schedule].chunks or (2 if "interleaved" in schedule else 1)
    order = build_schedule(schedule, n_devices * chunks, count, n_devices=n_devices)
    last = order.n_stages - 1
    routes = (*chain(order.n_stages), Route("skip", 0, (last,)), Route(LOSS, last, (HOST,)))
    if meets:
        return lower(order, routes, overlap=True)
    passes = lowering(routes, overlap=True)
    kept = tuple(step for step in passes.passes if step.name != "meetings")
    return replace(passes, passes=kept).run(order, lambda _: None)


def with_rows(program: Program, change: Callable[[Sequence[Instruction], int], Iterator[Instruction]]) -> Program:
    return replace(program, rows=tuple(tuple(change(row, device)) for device, row in enumerate(program.rows)))


def is_message(instruction: Instruction) -> bool:
    return instruction.op in (Op.SEND, Op.RECV) and instruction.peer != HOST


@pytest.mark.parametrize("schedule", [*compared_names(), "forward"])
def test_random_programs_end_under_every_rule_and_compute_what_they_should(schedule: str) -> None:
    """benchmarks/rank_launches.py checks 10,000 of them."""
    for seed in range(5):
        assert check(drawn_program(seed, schedule)) > 0


def test_a_step_of_zero_bubble_under_the_strictest_rule() -> None:
    world = FakeWorld(built("zb-h1", 4, 6), [2] * 6)
    assert execute(world.rows, **STRICT, seed=0) > sum(map(len, world.rows.values()))
    assert world.computed == 4 * 6 * 3 + 6 * 2  # F, I and W, and the host


@pytest.mark.parametrize("is_first_step", [False, True])
def test_hosts_may_wait_for_each_of_their_launches(is_first_step: bool) -> None:
    """A host that allocates memory of the device, or reads a number from it, waits for all that it has launched."""
    for schedule in [*compared_names(), "forward"]:
        rows = launches_of(drawn_program(1, schedule))
        for is_buffered in (False, True):
            execute(rows, Queue.DEVICE, is_buffered=is_buffered, is_first_step=is_first_step, is_synchronous=True)


def test_a_host_that_waits_before_it_has_launched_what_its_peers_need_is_caught() -> None:
    """The trap of receives that are launched early: on streams of their own they end, unless a host waits for them."""
    world = FakeWorld(with_rows(built("1f1b", 3, 4), front_loaded), [2] * 4)
    assert execute(world.rows, Queue.STREAMS, is_buffered=False)
    with pytest.raises(Deadlock, match="RECV"):
        execute(world.rows, Queue.STREAMS, is_buffered=False, is_synchronous=True)


def test_a_computation_waits_for_the_collectives_whose_results_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stream that sends first would wait, and the others that use the value would not."""
    waits: list[AsyncCollectiveTensor] = []
    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", lambda self: waits.append(self))
    sums = [AsyncCollectiveTensor(torch.ones(2)) for _ in range(3)]
    frame: Any = SimpleNamespace(registers=[None] * 4)

    def compute(frame: Frame) -> None:
        frame.registers[:] = [*sums, torch.ones(2)]

    rank_code._then_waited(compute, (0, 2, 3))(frame)
    assert [id(one) for one in waits] == [id(sums[0]), id(sums[2])]


# -- traps ------------------------------------------------------------------------------------------------------------


def front_loaded(row: Sequence[Instruction], device: int) -> Iterator[Instruction]:
    yield from (each for each in row if each.op is Op.RECV)
    yield from (each for each in row if each.op is not Op.RECV)


def test_receives_in_front_of_the_row_are_caught_where_a_device_has_one_queue() -> None:
    """Posted first, they fill the queue; nobody computes what they wait for."""
    world = FakeWorld(with_rows(built("1f1b", 3, 4), front_loaded), [2] * 4)
    assert execute(world.rows, Queue.STREAMS, is_buffered=False)
    for queue in (Queue.COMMUNICATORS, Queue.DEVICE):
        for is_buffered in (False, True):
            with pytest.raises(Deadlock, match=r"rank 0: RECV v0'1#0\[0\] from 1\n  rank 1: SEND v0'1#0\[0\] to 0"):
                execute(world.rows, queue, is_buffered=is_buffered)


def test_one_fifo_for_both_directions_is_caught() -> None:
    """Devices 0 and 1 each launch a send that the other receives later: in one order, neither send has a partner."""
    world = FakeWorld(built("1f1b", 4, 8, meets=False), [2] * 8)
    assert execute(world.rows, Queue.STREAMS, is_buffered=False, communicators=directed)
    with pytest.raises(Deadlock, match=r"each waits for the next") as caught:
        execute(world.rows, Queue.STREAMS, is_buffered=False, communicators=BOTH_WAYS)
    assert re.search(r"rank (\d): SEND \S+ to (\d)\n  rank \2: SEND \S+ to \1", str(caught.value))


def test_the_order_of_meetings_is_proven_for_one_fifo_as_well() -> None:
    for schedule in [*compared_names(), "forward"]:
        world = FakeWorld(built(schedule, 4, 6), [2] * 6)
        for queue in Queue:
            assert execute(world.rows, queue, is_buffered=False, communicators=BOTH_WAYS)


def by_parity(row: Sequence[Instruction], device: int) -> Iterator[Instruction]:
    """Even devices send before they receive, odd ones receive before they send, within what is between two computes."""
    run: list[Instruction] = []
    for instruction in row:
        if is_message(instruction):
            run.append(instruction)
            continue
        if instruction.op is Op.COMPUTE:
            yield from sorted(run, key=lambda each: (each.op is Op.RECV) == (device % 2 == 0))
            run = []
        yield instruction
    yield from run


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
def test_sending_by_parity_is_caught_in_a_loop_of_odd_length(schedule: str) -> None:
    """In a loop of three, ranks 0 and 2 are neighbours and both even: both send first."""
    world = FakeWorld(with_rows(built(schedule, 3, 6, meets=False), by_parity), [2] * 6)
    with pytest.raises(Deadlock, match="rank 0: SEND"):
        execute(world.rows, **STRICT)


def test_messages_that_are_received_in_another_order_than_sent_are_caught() -> None:
    """There are no tags: the values arrive, as others."""

    def swapped(row: Sequence[Instruction], device: int) -> Iterator[Instruction]:
        received = [index for index, each in enumerate(row) if each.op is Op.RECV and each.peer == 0]
        order = list(row)
        if device == 1:
            first, second = received[:2]
            order[first], order[second] = row[second], row[first]
        yield from order

    program = with_rows(built("gpipe", 2, 3, meets=False), swapped)
    world = FakeWorld(program, [2] * 3)
    with pytest.raises(AssertionError, match=r"reads .* for v0#"):
        execute(world.rows, Queue.STREAMS, is_buffered=True, seed=0)


def test_a_message_of_another_size_is_caught() -> None:
    world = FakeWorld(built("gpipe", 2, 3), [2, 2, 1])
    values = world.rows[1]
    world.wires[0, 1].append(torch.zeros(8, dtype=torch.uint8))  # one that nobody receives
    with pytest.raises(AssertionError, match="a message of 8 bytes into 16"):
        execute({0: world.rows[0], 1: values}, Queue.STREAMS, is_buffered=True, seed=0)


def test_copies_that_reduce_in_different_orders_are_caught() -> None:
    worlds = [FakeWorld(built("interleaved", 2, 4), [2] * 4, copy) for copy in range(2)]
    add_collectives(worlds, is_sharded=False)
    rows = {rank: row for world in worlds for rank, row in world.rows.items()}
    assert execute(rows, **STRICT)
    row = rows[1, 0]
    first = next(launch for launch in row if launch.lane == "reduce")
    row.remove(first)
    row.append(first)  # launched after the loss of the other copy awaits it
    row.insert(0, row.pop(row.index(first)))
    with pytest.raises(Deadlock):
        execute(rows, **STRICT)


def needs(launch: Launched) -> set[Launched]:
    """All launches that one waits for on its own rank."""
    found, pending = set[Launched](), [launch]
    while pending:
        new = set(pending.pop().after) - found
        found |= new
        pending += new
    return found


@pytest.mark.parametrize("schedule", ["looped-bfs", "interleaved"])
def test_parameters_are_gathered_beside_the_block_before(schedule: str) -> None:
    """The simulator lets a gathering begin after what precedes it in the row, and what follows run beside it, up to its reader."""
    order = insert_sharding(build_schedule(schedule, 4, 4, n_devices=2))
    routes = (*chain(order.n_stages), Route(LOSS, order.n_stages - 1, (HOST,)))
    worlds = [FakeWorld(lower(order, routes, overlap=True), [2] * 4, copy) for copy in range(2)]
    add_sharding(worlds)
    rows = {rank: row for world in worlds for rank, row in world.rows.items()}
    for queue, is_buffered in product(Queue, (False, True)):
        assert execute(rows, queue, is_buffered=is_buffered)
    beside = 0
    for row in rows.values():
        for place, gathering in enumerate(row):
            if gathering.group is not None and "UNSHARD" in str(gathering.what):
                computed = [one for one in row[place + 1 :] if one.lane == row[place - 1].lane]
                reader = next(one for one in computed if gathering in one.after)
                between = computed[: computed.index(reader)]
                assert not any(gathering in needs(one) for one in between)
                beside += any(one.what.action and one.what.action.microbatch >= 0 for one in between)  # type: ignore[attr-defined]
    assert beside >= len(rows)


def survives(program: Program) -> bool:
    """Whether a program computes what it should in 20 orders that its waits allow."""
    try:
        for seed in range(20):
            world = FakeWorld(program, [2] * program.n_microbatches)
            execute(world.rows, Queue.STREAMS, is_buffered=True, seed=seed)
    except (AssertionError, TypeError):  # read before it is there
        return False
    return True


@pytest.mark.parametrize("what", ["the copy that is read", "the last reader of the buffer", "the copy that is sent"])
def test_a_missing_wait_is_caught(what: str) -> None:
    """Without the wait a launch may run before what it needs: here in the order of the row, its streams apart."""

    def harmed(program: Program, device: int, apart: Callable[[int, int], bool]) -> tuple[Launch, ...]:
        planned = row_launches(program, device, apart)
        row = program.rows[device]
        op = {
            "the copy that is read": Op.COMPUTE,
            "the last reader of the buffer": Op.RECV,
            "the copy that is sent": Op.FREE,
        }
        return tuple(
            replace(launch, waits=()) if row[index].op is op[what] else launch for index, launch in enumerate(planned)
        )

    program = built("gpipe", 3, 9)
    assert survives(program)
    with patch.object(rank_code, "row_launches", harmed):
        assert not survives(program)


# -- layouts ----------------------------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """A model with a value whose size the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y) + x[x[:, 0] > 0].sum()


def test_the_layout_of_a_value_is_fixed_unless_the_data_decide_its_size() -> None:
    graph = pc.trace(Sizes(), torch.randn(6, 4))
    named = {str(node.target): node.name for node in graph.graph.nodes}
    fixed = fixed_names(graph, ())
    assert {LOSS, named["first"], named["second"], "x"} <= fixed
    (chosen,) = [
        node.name for node in graph.graph.nodes if node.op != "output" and node.name not in fixed and "get" in node.name
    ]
    assert chosen not in fixed
