from __future__ import annotations

from itertools import permutations

from schedule_times import rows

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.v_list import few_on_vee, list_schedule_on_vee
from pipecompile.verifiers import verify


def test_the_order_decides_which_ready_action_starts() -> None:
    """On one device, F1 before F0 is depth first; F0 before F1 runs all forwards of the first stage first."""
    quotas = ([2], [2])
    deep, wide = (list_schedule_on_vee(2, quotas, 4, order) for order in ("F1 F0 I0 I1", "F0 F1 I0 I1"))
    assert " ".join(map(str, deep.rows[0])) == "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 0W0 1W0 0W1 1W1"
    assert " ".join(map(str, wide.rows[0])) == "0F0 0F1 1F0 1F1 1I0 0I0 1I1 0I1 0W0 1W0 0W1 1W1"


def test_quotas_and_capacity_bound_what_waits() -> None:
    m, capacity = 5, 2
    result = list_schedule_on_vee(m, ([1, 1], [1, 1]), capacity, "I1 I0 F1 F0")
    schedule = Schedule(4, m, vee(2), result.rows)
    verify(schedule)
    for row in schedule.rows:
        waiting = 0
        for action in row:
            waiting += {"F": 1, "W": -1}.get(action.kind.value, 0)
            assert waiting <= capacity
    assert len(rows(schedule)) == 2


def test_no_other_order_is_faster_with_few_micro_batches() -> None:
    for p in range(1, 5):
        for m in range(1, 2 * p):
            unbounded = (m,) * p
            orders = map(" ".join, permutations(["F0", "F1", "I0", "I1"]))
            all_orders = (list_schedule_on_vee(m, (unbounded, unbounded), 2 * p, order).seconds for order in orders)
            assert few_on_vee(m, p).seconds == min(all_orders)
