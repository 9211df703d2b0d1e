from __future__ import annotations

from dataclasses import replace
from math import inf

from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.priority_rules import candidate_rules, needed_in_flight
from pipecompile.schedules.search.workload import Transfer, unit_workload


def test_a_stage_needs_its_time_from_f_to_i_in_periods() -> None:
    """Of four equal stages, 8 seconds lie between the first F and its I, and a period is F + I + W = 3 seconds."""
    assert needed_in_flight(unit_workload(loop(4, 4))) == [8 / 3, 6 / 3, 4 / 3, 2 / 3]


def test_transfers_and_recomputation_change_what_is_needed() -> None:
    work = unit_workload(loop(2, 2))
    slow = replace(work, forward_transfers=((Transfer(1, 3.0, (1,)),), ()))
    assert needed_in_flight(slow) == [(4 + 2 * 3) / 3, 2 / 3]
    assert needed_in_flight(replace(work, is_recomputed=(True, False))) == [4 / 4, 2 / 4]


def test_the_bottleneck_device_has_all_its_stages() -> None:
    assert needed_in_flight(unit_workload(vee(2))) == [8 / 6, 6 / 6, 4 / 6, 2 / 6]


def test_the_first_rule_is_unbounded_and_all_quotas_are_within_the_micro_batches() -> None:
    rules = list(candidate_rules(unit_workload(loop(3, 3)), 5))
    assert len(rules) == 48
    assert rules[0].in_flight == (5, 5, 5)
    assert all(1 <= quota <= 5 for rule in rules for quota in rule.in_flight)
    assert len(list(candidate_rules(unit_workload(vee(2)), 5))) == 96


def test_forwards_come_first_or_last_and_later_stages_are_more_urgent() -> None:
    backward_before, forward_before = (
        next(rule for rule in candidate_rules(unit_workload(loop(2, 2)), 3) if (rule.backward[0] > 0) == is_forward)
        for is_forward in (False, True)
    )
    assert max(backward_before.backward) < min(backward_before.forward)
    assert max(forward_before.forward) < min(forward_before.backward)
    assert backward_before.backward[1] < backward_before.backward[0]
    assert backward_before.forward[1] < backward_before.forward[0]


def test_stages_that_take_no_time_need_nothing() -> None:
    zero = (0.0, 0.0)
    work = replace(unit_workload(loop(2, 2)), forward=zero, input_grad=zero, weight_grad=zero, backward=zero)
    assert needed_in_flight(work) == [0.0, 0.0]
    assert inf not in {quota for rule in candidate_rules(work, 3) for quota in rule.in_flight}
