"""Turns of threads whose stages have state of the user's: which stages compute at the same time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.ir import Action, Kind
from pipecompile.passes import lower
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.cells.state_turns import StageLocks, StateTurns
from pipecompile.runtime.registers import Frame

FRAME = Frame([], [])


def _meet(turns: StateTurns, *stages: int, kind: Kind = Kind.FORWARD, frame: Frame = FRAME) -> bool:
    """Return whether actions of these stages, each in a thread, compute at the same time."""
    barrier, met = threading.Barrier(len(stages)), []

    def compute(_frame: Frame) -> None:
        try:
            barrier.wait(0.2)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)

    runs = [turns.around(compute, Action(stage, kind, 0)) for stage in stages]
    threads = [threading.Thread(target=run, args=(frame,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(met)


def _run_once(turns: StateTurns, *stages: int) -> None:
    for stage in stages:
        turns.around(lambda _frame: None, Action(stage, Kind.FORWARD, 0))(FRAME)


def _turns(*near: list[Any], **options: Any) -> StateTurns:
    """Return the turns of stages with these containers near."""
    places: Any = {stage: SimpleNamespace(containers=lambda one=one: one) for stage, one in enumerate(near)}
    return StateTurns(places, **({"reaches": False} | options))


def test_stages_with_a_container_in_common_take_turns() -> None:
    shared: dict[str, int] = {}
    turns = _turns([shared], [{}], [[], shared])
    _run_once(turns, 0, 1, 2)
    assert not _meet(turns, 0, 2)
    assert _meet(turns, 0, 1)


def test_stages_take_turns_until_all_have_run_once() -> None:
    own: list[dict[str, int]] = [{}, {}, {}]
    turns = _turns(*([one] for one in own))
    _run_once(turns, 0, 1)
    assert not _meet(turns, 0, 1)
    _run_once(turns, 2)
    assert _meet(turns, 0, 1, 2)


def test_all_stages_take_turns_if_some_reach_what_others_hold() -> None:
    own: list[dict[str, int]] = [{}, {}]
    turns = _turns([own[0]], [own[1]], reaches=True)
    _run_once(turns, 0, 1)
    assert not _meet(turns, 0, 1)


def test_a_stage_without_state_never_waits() -> None:
    turns = _turns([{}], [{}], reaches=True)
    assert _meet(turns, 0, 5, 6)


def test_backwards_with_hooks_take_turns_with_all_that_leave_something() -> None:
    own: list[dict[str, int]] = [{}, {}]
    turns = _turns([own[0]], [own[1]], hooked={2})
    _run_once(turns, 0, 1)
    assert not _meet(turns, 0, 1, kind=Kind.BACKWARD)
    assert not _meet(turns, 1, 2, kind=Kind.BACKWARD)
    assert _meet(turns, 1, 3, kind=Kind.BACKWARD)
    assert _meet(turns, 1, 2)


def test_hooks_that_are_registered_later_make_all_backwards_take_turns() -> None:
    own: list[dict[str, int]] = [{}, {}]
    turns, hooked = _turns([own[0]], [own[1]], hooked=()), Frame([], [], has_hooks=True)
    _run_once(turns, 0, 1)
    assert _meet(turns, 0, 1, 2, kind=Kind.BACKWARD)
    assert not _meet(turns, 0, 1, kind=Kind.BACKWARD, frame=hooked)
    assert not _meet(turns, 1, 2, kind=Kind.BACKWARD, frame=hooked)


@pytest.mark.parametrize(("threaded", "n_stateful"), [(False, 2), (True, 1), (True, 0)])
def test_nothing_is_around_actions_that_cannot_meet(threaded: bool, n_stateful: int) -> None:
    effects = [SideEffects(runs_python=stage < n_stateful) for stage in range(3)]
    cells: list[Any] = [SimpleNamespace(all_effects=(one,)) for one in effects]
    turns = StateTurns.of(cells, threaded=threaded, reaches=True)

    def run(_frame: Frame) -> None:
        return None

    assert all(turns.around(run, Action(stage, Kind.FORWARD, 0)) is run for stage in range(3))


PROGRAM = lower(pc.build_schedule("chimera", 2, 4))


def _most_at_once(locks: StageLocks, stages: tuple[int, int]) -> int:
    """Return how many of two actions in two threads, of these stages, compute at the same time."""
    inside, most = [0], [0]

    def compute(_frame: Frame) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1

    runs = [locks.around(compute, Action(stage, Kind.FORWARD, m)) for m, stage in enumerate(stages)]
    threads = [threading.Thread(target=run, args=(Frame([], []),)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return most[0]


def test_copies_of_a_stage_wait_for_each_other() -> None:
    assert _most_at_once(StageLocks(PROGRAM, threaded=True), (0, 0)) == 1
    assert _most_at_once(StageLocks(PROGRAM, threaded=True), (0, 1)) == 2


def test_others_have_no_lock() -> None:
    def run(_frame: Frame) -> Any:
        return None

    for locks in (
        StageLocks(PROGRAM, threaded=False),
        StageLocks(lower(pc.build_schedule("1f1b", 2, 4)), threaded=True),
    ):
        assert locks.around(run, Action(0, Kind.FORWARD, 0)) is run
