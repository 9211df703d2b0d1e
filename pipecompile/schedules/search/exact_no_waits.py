"""Schedules without waits in the exact model: every action starts when its device and its inputs are there, as programs run.

    device 0   F0 │ F1 │ ·wait· │ I0       a solution of the model may wait, so that the gradient of I1 arrives after a release of memory
    device 1        F0 │ I0 ──┘            no program does: the gradient arrives as soon as it is sent, and exceeds the memory

A start is the end of another action on the device, or the arrival of an input, or 0. Two ticks are left for rounded durations. Every
action may be after every other one of its device, so the constraints are for small problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipecompile.ir import Kind
from pipecompile.schedules.search.exact_variables import ExactModel, Key
from pipecompile.simulation.costs import Costs

__all__ = ["forbid_waits", "never_wait"]

_ORDER = (Kind.FORWARD, Kind.RECOMPUTE, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)

_ROUNDED = 2
"""Ticks by which a start may come after the end that it follows, if durations are rounded."""


def never_wait(costs: Costs) -> bool:
    """Return whether actions wait for nothing but their device and their inputs under these costs."""
    is_launched = any(costs.launch) or bool(costs.streams)
    return not is_launched and costs.sharding is None and not costs.has_input_seconds


def forbid_waits(built: ExactModel, placement: Sequence[int]) -> None:
    """Add that every action, and every message, starts when something ends that it has to wait for."""
    for key in built.start:
        before = [each for each in built.start if placement[each[1]] == placement[key[1]] and _may_precede(each, key)]
        ends = [(built.end[each], _presence(built, each)) for each in before]
        ends += [(arrival, None) for arrival in built.arrivals.get(key, ())]
        _start_at_one(built, built.start[key], ends, _presence(built, key))
    for copy in built.copies:
        others = [each for each in built.copies if each is not copy and {*each.engines} & {*copy.engines}]
        ends = [(copy.ready, None), *((each.leaves + each.ticks, None) for each in others)]
        _start_at_one(built, copy.leaves, ends, None)


def _may_precede(one: Key, other: Key) -> bool:
    """Return False if an action is another one, or always comes after it."""
    (kind, s, m), (other_kind, other_s, other_m) = one, other
    return s != other_s or m < other_m or _ORDER.index(kind) < _ORDER.index(other_kind)


def _presence(built: ExactModel, key: Key) -> Any:
    """Return the literal that an action is there, None if it always is."""
    return built.recomputes.get(key[1]) if key[0] is Kind.RECOMPUTE else None


def _start_at_one(built: ExactModel, start: Any, ends: Iterable[tuple[Any, Any]], presence: Any) -> None:
    """Add that `start`, if `presence` holds, is 0 or one of the ends whose own presence holds."""
    model, slack = built.model, 0 if built.tick.is_exact else _ROUNDED
    choices = [model.new_bool_var("")]
    model.add(start <= slack).only_enforce_if(choices[0])
    for end, is_there in ends:
        choice = model.new_bool_var("")
        model.add(start >= end).only_enforce_if(choice)
        model.add(start <= end + slack).only_enforce_if(choice)
        if is_there is not None:
            model.add_implication(choice, is_there)
        choices.append(choice)
    model.add_bool_or([*choices, *([] if presence is None else [~presence])])
