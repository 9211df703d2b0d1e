"""What hypothesis draws: schedules, routes with skips, and the programs that come of them."""

from __future__ import annotations

from hypothesis import strategies as st

from pipecompile.ir import HOST, Action, Instruction, Kind, Op, Operand, Program, Route, Schedule, Value
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 8) -> Schedule:
    """Any builder's schedule, on fewer devices than stages where it can be, its backwards split at random."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "forward"]))
    n_stages = draw(st.integers(1, max_stages))
    dividing = [n for n in range(1, n_stages + 1) if n_stages % n == 0]
    n_devices = n_stages if name == "1f1b" else draw(st.sampled_from(dividing))
    schedule = build_schedule(name, n_stages, draw(st.integers(1, max_microbatches)), n_devices=n_devices)
    return split_backward(schedule, draw(st.sampled_from([0, 1, 3, 100]))) if draw(st.booleans()) else schedule


def split_backward(schedule: Schedule, delay: int) -> Schedule:
    """Each B becomes I, and W as many actions later as `delay` says, or at the end."""
    rows = []
    for row in schedule.rows:
        left: list[Action] = []
        waiting: list[tuple[int, Action]] = []
        for action in row:
            backward = action.kind is Kind.BACKWARD
            if backward:
                waiting.append((len(left) + delay, Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch)))
            left.append(Action(action.stage, Kind.INPUT_GRAD, action.microbatch) if backward else action)
            while waiting and waiting[0][0] < len(left):
                left.append(waiting.pop(0)[1])
        rows.append((*left, *(action for _, action in waiting)))
    return Schedule(
        schedule.n_stages, schedule.n_microbatches, schedule.placement, tuple(rows), f"{schedule.name} split"
    )


@st.composite
def route_lists(draw: st.DrawFn, n_stages: int, max_size: int = 5) -> tuple[Route, ...]:
    """Routes that skip, fan out, come from the host and go to it."""
    routes = []
    for index in range(draw(st.integers(0, max_size))):
        source = draw(st.sampled_from([HOST, *range(n_stages)]))
        ends = [*range(source + 1, n_stages), HOST]
        chosen = draw(st.sets(st.sampled_from(ends), min_size=1))
        consumers = tuple(end for end in ends if end in chosen)
        routes.append(Route(f"r{index}", source, consumers, float(draw(st.integers(0, 9))), draw(st.booleans())))
    return tuple(routes)


@st.composite
def programs(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 8) -> Program:
    """Lowered programs; they were verified after every pass."""
    schedule = draw(schedules(max_stages, max_microbatches))
    return lower(schedule, draw(route_lists(schedule.n_stages)))


_ENDS = st.just(HOST) | st.integers(0, 99)
_NAMES = st.text(min_size=1).filter(lambda name: not any(c.isspace() or c in "#'[]" for c in name))
_VALUES = st.builds(Value, _NAMES, st.integers(0, 99), st.none() | _ENDS)
_OPERANDS = st.builds(Operand, _VALUES, st.none() | st.integers(0, 99))
_SIDES = st.lists(_OPERANDS, max_size=3).map(tuple)
_ONE = _OPERANDS.map(lambda operand: (operand,))
_ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 99))
_INSTRUCTIONS = (
    st.builds(Instruction, st.just(Op.COMPUTE), _SIDES, _SIDES, _ACTIONS)
    | st.builds(Instruction, st.just(Op.SEND), _ONE, st.just(()), st.none(), _ENDS)
    | st.builds(Instruction, st.just(Op.RECV), st.just(()), _ONE, st.none(), _ENDS)
    | st.builds(Instruction, st.just(Op.FREE), _ONE)
)
_ROUTES = st.builds(
    Route, _NAMES, _ENDS, st.lists(_ENDS, max_size=3).map(tuple), st.floats(0, allow_infinity=False), st.booleans()
)


def wild_programs() -> st.SearchStrategy[Program]:
    """Anything that the grammar can say, legal or not."""
    rows = st.lists(st.lists(_INSTRUCTIONS, max_size=4).map(tuple), max_size=3).map(tuple)
    placement = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    counts = st.integers(0, 99)
    return st.builds(Program, counts, counts, placement, st.lists(_ROUTES, max_size=3).map(tuple), rows)
