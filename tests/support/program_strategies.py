"""What hypothesis draws: schedules, routes with skips, and the programs that come of them."""

from __future__ import annotations

from hypothesis import strategies as st

from pipecompile.ir import HOST, SHARDING, Action, Instruction, Kind, Op, Operand, Program, Route, Schedule, Tie, Value
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.overlapping import insert_overlap
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names


@st.composite
def catalogue_schedules(draw: st.DrawFn, max_stages: int = 8, max_microbatches: int = 12) -> Schedule:
    """Any builder's schedule, with several stages on a device where it can be."""
    name = draw(st.sampled_from([*compared_names(), "forward"]))
    chunks = CATALOGUE[name].chunks or draw(st.integers(1, 3))
    n_devices = draw(st.integers(1, max(1, max_stages // chunks)))
    return build_schedule(name, n_devices * chunks, draw(st.integers(1, max_microbatches)), n_devices=n_devices)


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 8) -> Schedule:
    """A schedule of the catalogue, overlapped, its backwards split and its forwards recomputed at random."""
    schedule = draw(catalogue_schedules(max_stages, max_microbatches))
    if draw(st.booleans()):
        schedule = insert_overlap(schedule)
    if draw(st.booleans()):
        schedule = split_backward(schedule, draw(st.sampled_from([0, 1, 3, 100])))
    flags = draw(st.sampled_from(["never", "always", "except_last", None]))
    if flags is None:
        flags = draw(st.lists(st.booleans(), min_size=schedule.n_stages, max_size=schedule.n_stages))
    schedule = insert_recompute(schedule, flags)
    return advance_recompute(schedule, draw(st.integers(1, 3))) if draw(st.booleans()) else schedule


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
def tie_lists(draw: st.DrawFn, n_stages: int) -> tuple[Tie, ...]:
    """Parameters that some stages share."""
    if n_stages < 2:
        return ()
    shared = st.sets(st.integers(0, n_stages - 1), min_size=2).map(lambda stages: tuple(sorted(stages)))
    found = draw(st.lists(shared, max_size=2))
    return tuple(Tie(f"t{index}", stages, float(index)) for index, stages in enumerate(found))


@st.composite
def programs(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 8) -> Program:
    """Lowered programs; they were verified after every pass."""
    schedule = draw(schedules(max_stages, max_microbatches))
    routes, ties = draw(route_lists(schedule.n_stages)), draw(tie_lists(schedule.n_stages))
    return lower(schedule, routes, ties=ties, receive_ahead=draw(st.sampled_from([0, 0, 1, 2, 99])))


_ENDS = st.just(HOST) | st.integers(0, 99)
_NAMES = st.text(min_size=1).filter(lambda name: not any(c.isspace() or c in "#'[]" for c in name))
_VALUES = st.builds(Value, _NAMES, st.integers(0, 99), st.none() | _ENDS)
_OPERANDS = st.builds(Operand, _VALUES, st.none() | st.integers(0, 99))
_SIDES = st.lists(_OPERANDS, max_size=3).map(tuple)
_ONE = _OPERANDS.map(lambda operand: (operand,))
_CELLS = [kind for kind in Kind if kind not in SHARDING]
_ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(_CELLS), st.integers(0, 99)) | st.builds(
    Action, st.integers(0, 99), st.sampled_from(SHARDING)
)
_INSTRUCTIONS = (
    st.builds(Instruction, st.just(Op.COMPUTE), _SIDES, _SIDES, _ACTIONS, overlaps=st.booleans())
    | st.builds(Instruction, st.just(Op.SEND), _ONE, st.just(()), st.none(), _ENDS)
    | st.builds(Instruction, st.just(Op.RECV), st.just(()), _ONE, st.none(), _ENDS)
    | st.builds(Instruction, st.just(Op.FREE), _ONE)
    | st.builds(Instruction, st.sampled_from([Op.BROADCAST, Op.REDUCE]), tie=_NAMES)
)
_ROUTES = st.builds(Route, _NAMES, _ENDS, st.lists(_ENDS, max_size=3).map(tuple), st.floats(0, 1e100), st.booleans())

_TIES = st.builds(Tie, _NAMES, st.lists(st.integers(0, 99), max_size=3).map(tuple), st.floats(0, 1e100))


def wild_programs() -> st.SearchStrategy[Program]:
    """Anything that the grammar can say, legal or not."""
    rows = st.lists(st.lists(_INSTRUCTIONS, max_size=4).map(tuple), max_size=3).map(tuple)
    placement = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    counts = st.integers(0, 99)
    routes, ties = (st.lists(each, max_size=3).map(tuple) for each in (_ROUTES, _TIES))
    return st.builds(Program, counts, counts, placement, routes, rows, ties)
