from __future__ import annotations

from dataclasses import replace
from math import inf

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.release_lags import Lag, release_lags
from pipecompile.schedules.search.workload import unit_workload


def test_as_many_forwards_run_ahead_as_fit() -> None:
    work = replace(unit_workload(loop(2, 2)), split=False)
    assert release_lags(work, (3.0, inf), 8) == [Lag(0, 0, Kind.INPUT_GRAD, 3)]
    assert release_lags(work, (3.5, inf), 8) == [Lag(0, 0, Kind.INPUT_GRAD, 3)]
    assert release_lags(work, (9.0, inf), 8) == []


def test_what_i_leaves_for_w_is_waited_for_as_well() -> None:
    assert release_lags(unit_workload(loop(1, 1)), (3.0,), 8) == [
        Lag(0, 0, Kind.INPUT_GRAD, 3, 1.0),
        Lag(0, 0, Kind.WEIGHT_GRAD, 3),
    ]


def test_a_stage_is_held_while_a_later_stage_of_its_device_runs() -> None:
    """Device 0 of a V has stages 0 and 3. With room for 2, the second forward of stage 0 waits until stage 3 has released the first."""
    work = replace(unit_workload(vee(2)), split=False)
    assert Lag(0, 3, Kind.INPUT_GRAD, 1) in release_lags(work, (2.0, inf), 8)
    assert Lag(0, 3, Kind.INPUT_GRAD, 2) in release_lags(work, (3.0, inf), 8)


def test_recomputed_stages_hold_their_recipe() -> None:
    work = replace(unit_workload(loop(1, 1)), split=False, is_recomputed=(True,), recipe=(0.25,))
    assert release_lags(work, (1.0,), 8) == [Lag(0, 0, Kind.INPUT_GRAD, 4)]


def test_a_forward_waits_for_w_or_for_more_i_where_what_i_leaves_is_too_large_beside_the_others() -> None:
    """Room for 2.2: two in flight and a third of 1 fit if both ran I (0.5 each), or if the first ran W, which takes 3."""
    work = replace(unit_workload(loop(1, 1)), weight_saved=(0.5,), weight_grad=(3.0,))
    assert release_lags(work, (2.2,), 8)[0] == Lag(0, 0, Kind.INPUT_GRAD, 2, 1.0)
    assert release_lags(work, (2.5,), 8)[0] == Lag(0, 0, Kind.INPUT_GRAD, 2, 0.0)
    assert release_lags(replace(work, weight_grad=(0.7,)), (2.2,), 8)[0].seconds == 0.7


def test_w_is_waited_for_where_the_forward_itself_needs_the_room() -> None:
    """Room for 2.4: beside a forward of 1, no three micro-batches that wait for W (0.5 each) fit."""
    work = replace(unit_workload(loop(1, 1)), weight_saved=(0.5,))
    assert Lag(0, 0, Kind.WEIGHT_GRAD, 3) in release_lags(work, (2.4,), 8)


def test_a_forward_waits_for_w_of_a_later_stage_of_its_device() -> None:
    """Device 0 of a V, room for 3: two of stage 0 beside one of stage 3. A third fits only after W of stage 3, or I of stage 0."""
    lags = release_lags(unit_workload(vee(2)), (3.0, inf), 8)
    assert Lag(0, 3, Kind.INPUT_GRAD, 2, 1.0) in lags


def test_a_micro_batch_of_a_later_stage_counts_with_what_earlier_stages_hold_of_it() -> None:
    """Device 0 of a V, room for 3: stage 3 holds 2 per micro-batch, so one at a time; and a second waits for W, or for I of stage 0."""
    lags = release_lags(unit_workload(vee(2)), (3.0, inf), 8)
    assert Lag(3, 3, Kind.INPUT_GRAD, 1, 1.0) in lags
    assert Lag(3, 3, Kind.WEIGHT_GRAD, 2) in lags


def test_a_later_stage_waits_for_an_earlier_one_that_holds_too_many() -> None:
    """Device 0 of a V, room for 3.5: beside stage 3 on micro-batch 2, stage 0 has room for micro-batches 1 and 2."""
    work = replace(unit_workload(vee(2)), split=False)
    assert Lag(3, 0, Kind.INPUT_GRAD, 2) in release_lags(work, (3.5, inf), 8)
    halves = replace(unit_workload(vee(2)), weight_saved=(0.5,) * 4, weight_grad=(0.25,) * 4)
    assert Lag(3, 0, Kind.INPUT_GRAD, 2, 0.0) in release_lags(halves, (3.5, inf), 8)
    assert Lag(3, 0, Kind.INPUT_GRAD, 2, 0.25) in release_lags(halves, (3.0, inf), 8)
