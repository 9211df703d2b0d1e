"""All instructions in one order for one thread: rows keep theirs, receives come after their sends."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.ir import HOST, Instruction, Kind, Op, Route
from pipecompile.ir.execution_order import _Merge, frees_after, in_turn, may_join_backward, merged
from pipecompile.passes import lower


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "interleaved"])
@pytest.mark.parametrize(("n_stages", "count"), [(1, 1), (2, 5), (4, 4), (5, 3)])
def test_merged_order_receives_after_it_sends(name: str, n_stages: int, count: int) -> None:
    program = lower(pc.build_schedule(name, n_stages, count))
    order = merged(program)
    assert sorted(order) == [(d, i) for d, row in enumerate(program.rows) for i in range(len(row))]
    for device in range(program.n_devices):
        assert [i for d, i in order if d == device] == list(range(len(program.rows[device])))
    there = set()
    for device, index in order:
        instruction = program.rows[device][index]
        if instruction.op is Op.SEND:
            there.add((instruction.reads[0].value, instruction.peer))
        if instruction.op is Op.RECV and instruction.peer != HOST:
            assert (instruction.writes[0].value, device) in there


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "eager-1f1b",
        "gpipe",
        "gpipe-remat",
        "hanayo",
        "interleaved",
        "mario",
        "po-full",
        "zb-h1",
        "zb-h2",
        "zb-2p",
    ],
)
@pytest.mark.parametrize(("n_stages", "count"), [(2, 4), (3, 4), (4, 7)])
@pytest.mark.parametrize("skips", [(), ((0, (2,)),), ((0, (1, 2)), (1, (2,)), (0, (2,)))], ids=str)
def test_with_a_stage_per_device_forwards_run_micro_batch_by_micro_batch(
    name: str, n_stages: int, count: int, skips: tuple[tuple[int, tuple[int, ...]], ...]
) -> None:
    """A row received a value of a later micro-batch first, so that one was computed before: random draws were others than in the model."""
    routes = [Route(f"v{s}", s, (s + 1,)) for s in range(n_stages - 1)]
    routes += [Route(f"skip{i}", s, to) for i, (s, to) in enumerate(skips) if max(to) < n_stages]
    program = lower(pc.build_schedule(name, n_stages, count), routes)
    order = in_turn(program)
    assert sorted(order) == [(d, i) for d, row in enumerate(program.rows) for i in range(len(row))]
    actions = [action for d, i in order if (action := program.rows[d][i].action) is not None]
    forwards = [(action.microbatch, action.stage) for action in actions if action.kind is Kind.FORWARD]
    assert forwards == sorted(forwards)
    for device, row in enumerate(program.rows):
        others = [i for d, i in order if d == device and row[i].op is not Op.RECV]
        assert others == sorted(others)
    defined = set()
    for d, i in order:
        assert {(d, one) for one in program.rows[d][i].reads} <= defined
        defined |= {(d, one) for one in program.rows[d][i].writes}


def test_a_device_that_waits_is_asked_again_only_after_a_message_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instruction asked all devices anew: with many values between stages, the waiting ones were most of the time of a first step."""
    calls: list[int] = []
    asked = _Merge.ready_index

    def counted(merge: _Merge, device: int) -> int | None:
        calls.append(device)
        return asked(merge, device)

    monkeypatch.setattr(_Merge, "ready_index", counted)
    program = lower(
        pc.build_schedule("gpipe", 5, 3), [Route(f"v{i}{s}", s, (s + 1,)) for s in range(4) for i in range(9)]
    )
    sends = sum(instruction.op is Op.SEND for row in program.rows for instruction in row)

    order = in_turn(program)

    assert len(calls) <= program.n_devices + len(order) + sends


def test_a_schedule_may_run_stages_out_of_order_where_no_value_asks_for_it() -> None:
    """Stage 0 sends to stage 2 alone, and device 1 has stage 1 run last."""
    schedule = pc.Schedule.from_csv("0F0,0F1,0B0,0B1\n2F0,2B0,2F1,2B1,1F0,1B0,1F1,1B1\n")
    program = lower(schedule, [Route("v", 0, (2,))])
    assert len(merged(program)) == sum(map(len, program.rows))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_frees_follow_what_comes_before_them_on_their_device(name: str) -> None:
    program = lower(pc.build_schedule(name, 4, 4, n_devices=2 if name == "zbv" else 4), [Route("v", 0, (1, 3))])
    freed = frees_after(program, merged(program))
    for device, row in enumerate(program.rows):
        again = []
        for index, operands in ((i, operands) for (d, i), operands in freed.items() if d == device):
            again += [row[index], *(Instruction(Op.FREE, reads=(operand,)) for operand in operands)]
        assert tuple(again) == row


def test_halves_are_joined_where_no_sum_changes() -> None:
    program, swapped = (
        lower(pc.Schedule.from_csv(f"0F0,0F1,0I0,0I1,{late}\n1F0,1I0,1F1,1I1,1W0,1W1\n"), [Route("v", 0, (1,))])
        for late in ("0W0,0W1", "0W1,0W0")
    )
    apart, tied = [frozenset({1}), frozenset({2, 3})], [frozenset({1, 2}), frozenset({2})]
    assert may_join_backward(program, apart)
    assert not may_join_backward(swapped, apart), "the weights of stage 0 add up in another order"
    assert not may_join_backward(program, tied), "a weight adds up what two stages give"
