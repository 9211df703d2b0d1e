from __future__ import annotations

from pipecompile.ir import HOST, Kind, Route, Schedule, chain
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.from_schedule import DeviceTransfer, device_transfers, tasks_of_schedule
from pipecompile.simulation.task_graph import Anchor


def test_a_value_goes_once_to_each_device_and_every_consumer_returns_a_gradient() -> None:
    routes = (Route("x", HOST, (0,)), Route("a", 0, (1, 2, 3, HOST), 10.0), Route("mask", 1, (2,), gradient=False))
    assert list(device_transfers(routes, (0, 1, 2, 1))) == [
        DeviceTransfer("a", None, 10.0, 0, 0, 1, (1, 3)),
        DeviceTransfer("a", None, 10.0, 0, 0, 2, (2,)),
        DeviceTransfer("a", 1, 10.0, 1, 1, 0, (0,)),
        DeviceTransfer("a", 2, 10.0, 2, 2, 0, (0,)),
        DeviceTransfer("a", 3, 10.0, 3, 1, 0, (0,)),
        DeviceTransfer("mask", None, 0.0, 1, 1, 2, (2,)),
    ]


def test_the_gradients_that_a_device_adds_up_are_one_transfer() -> None:
    route = Route("a", 0, (1, 2, 3, 4), 10.0, sums=((3, 1),))
    gradients = [t for t in device_transfers((route,), (0, 1, 2, 1, 0)) if t.consumer is not None]
    assert gradients == [DeviceTransfer("a", 1, 10.0, 1, 1, 0, (0,)), DeviceTransfer("a", 2, 10.0, 2, 2, 0, (0,))]


def test_values_within_a_device_are_no_transfers() -> None:
    assert list(device_transfers(chain(2), (0, 0))) == []


def test_tasks_and_messages_of_a_small_schedule() -> None:
    """Message t * M + m is transfer t of micro-batch m: values are 0 and 1, their gradients 2 and 3."""
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    tasks = tasks_of_schedule(schedule, chain(2), make_costs(2, 2, chain(2), forward=[1, 2], transfer=0.5))
    assert tasks.rows == [range(4), range(4, 8)]
    assert tasks.seconds == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert tasks.sends == [(0,), (1,), (), (), (), (2,), (), (3,)]
    assert tasks.needs == [(), (), (2,), (3,), (0,), (), (1,), ()]
    assert tasks.links == [(0, 1), (0, 1), (1, 0), (1, 0)]
    assert tasks.delays == [0.5] * 4
    assert [tasks.label(message) for message in range(4)] == ["v0#0", "v0#1", "v0'1#0", "v0'1#1"]
    assert tasks.changes == [[], []], "no stage saves anything"


def test_a_split_backward_sends_its_gradient_after_i() -> None:
    schedule = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    tasks = tasks_of_schedule(schedule, chain(2), make_costs(2, 2, chain(2)))
    kinds = [action.kind for action in tasks.actions if action is not None]
    assert [kind for kind, sent in zip(kinds, tasks.sends, strict=True) if sent] == [Kind.FORWARD, Kind.INPUT_GRAD]
    assert tasks.needs[1] == (1,)


def test_memory_is_saved_by_f_restored_by_r_and_freed_by_b_or_i_and_w() -> None:
    costs = make_costs(1, 1, (), saved_bytes=100, weight_saved_bytes=30, recipe_bytes=1)
    start, end = Anchor.TASK_START, Anchor.TASK_END

    def changes(row: str) -> list[tuple[Anchor, int, float]]:
        found = tasks_of_schedule(Schedule.from_csv(row), (), costs).changes[0]
        return [(anchor, task, size) for ((anchor, task),), size in found]

    assert changes("0F0,0B0\n") == [(start, 0, 100.0), (end, 1, -100.0)]
    assert changes("0F0,0I0,0W0\n") == [(start, 0, 100.0), (end, 1, -70.0), (end, 2, -30.0)]
    assert changes("0F0,0R0,0B0\n") == [(start, 0, 1.0), (start, 1, 100.0), (end, 1, -1.0), (end, 2, -100.0)]
    assert changes("0F0,0F1\n") == [], "a stage without a backward saves nothing"
