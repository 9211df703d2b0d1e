"""Random damages to schedules and programs, and what they are to be judged by.

A damage is small and plausible: something a hand, a bug in a pass, or a bad edit would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

from program_executor import MODELS, ExecutionError, execute

from pipecompile.errors import VerifyError
from pipecompile.ir import (
    HOST,
    NO_MICROBATCH,
    SHARDING,
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Program,
    Route,
    Schedule,
    Tie,
    Value,
)
from pipecompile.ir.overlap import Pair, is_pair
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.offloading import insert_offload
from pipecompile.passes.overlapping import insert_overlap
from pipecompile.passes.sharding import insert_sharding
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names
from pipecompile.verifiers import verify

Row = list[Instruction]

# -- what is damaged --------------------------------------------------------------------------------------------------


def random_schedule(rng: Random) -> Schedule:
    """Of the catalogue, overlapped, split, recomputed, offloaded and sharded here and there."""
    name = rng.choice([*compared_names(), "forward"])
    chunks = CATALOGUE[name].chunks or rng.randint(1, 3)
    n_devices = rng.randint(1, 4 if chunks == 1 else 2)
    schedule = build_schedule(name, n_devices * chunks, rng.randint(1, 4), n_devices=n_devices)
    if rng.random() < 0.4:
        pairs = sorted(insert_overlap(schedule).overlaps, key=str)
        schedule = replace(schedule, overlaps=frozenset(pair for pair in pairs if rng.random() < 0.7))
    if rng.random() < 0.3:
        schedule = split_backward(schedule, rng.choice([0, 1, 3]))
    if rng.random() < 0.4:
        schedule = insert_recompute(schedule, [rng.random() < 0.6 for _ in range(schedule.n_stages)])
        schedule = advance_recompute(schedule, rng.randint(1, 3))
    if rng.random() < 0.3:
        schedule = insert_offload(schedule, [s for s in range(schedule.n_stages) if rng.random() < 0.7])
    if rng.random() < 0.35:
        stages = [s for s in range(schedule.n_stages) if rng.random() < 0.8]
        schedule = insert_sharding(schedule, stages, ahead=rng.randint(0, 2))
    return schedule


def random_program(rng: Random) -> Program:
    """With skips, values from and for the host, and tied parameters."""
    return lowered_at_random(rng, random_schedule(rng))


def lowered_at_random(rng: Random, schedule: Schedule) -> Program:
    ties = ()
    if schedule.n_stages > 1 and rng.random() < 0.4:
        stages = sorted(rng.sample(range(schedule.n_stages), 2))
        ties = (Tie("w", tuple(stages), 4.0), *((Tie("u", (0, schedule.n_stages - 1)),) if rng.random() < 0.4 else ()))
    return lower(schedule, random_routes(rng, schedule.n_stages), ties=ties, receive_ahead=rng.choice([0, 0, 1, 3]))


def random_routes(rng: Random, n_stages: int) -> tuple[Route, ...]:
    """A chain now and then, and others besides."""
    routes = [Route(f"v{s}", s, (s + 1,)) for s in range(n_stages - 1)] if rng.random() < 0.7 else []
    for index in range(rng.randint(0, 3)):
        source = rng.choice([HOST, *range(n_stages)])
        ends = [*range(source + 1, n_stages), HOST]
        chosen = rng.sample(ends, rng.randint(1, min(3, len(ends))))
        consumers = tuple(end for end in ends if end in chosen)
        routes.append(Route("abc"[index], source, consumers, 1.0, rng.random() < 0.7))
    return tuple(routes)


# -- damages of a program ---------------------------------------------------------------------------------------------


def drop(rng: Random, row: Row, program: Program) -> Row:
    del row[rng.randrange(len(row))]
    return row


def duplicate(rng: Random, row: Row, program: Program) -> Row:
    row.insert(rng.randint(0, len(row)), rng.choice(row))
    return row


def swap(rng: Random, row: Row, program: Program) -> Row:
    """Two neighbours, or any two."""
    i = rng.randrange(len(row))
    j = min(i + 1, len(row) - 1) if rng.random() < 0.6 else rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    return row


def move(rng: Random, row: Row, program: Program) -> Row:
    row.insert(rng.randint(0, len(row) - 1), row.pop(rng.randrange(len(row))))
    return row


def move_message(rng: Random, row: Row, program: Program) -> Row:
    """A send or a receive, to a place nearby."""
    found = [index for index, i in enumerate(row) if i.op in (Op.SEND, Op.RECV)]
    if found:
        index = rng.choice(found)
        instruction = row.pop(index)
        row.insert(max(0, min(len(row), index + rng.randint(-3, 3))), instruction)
    return row


def early_free(rng: Random, row: Row, program: Program) -> Row:
    found = [index for index, i in enumerate(row) if i.op is Op.FREE and index]
    if found:
        index = rng.choice(found)
        row.insert(rng.randrange(index), row.pop(index))
    return row


def retarget(rng: Random, row: Row, program: Program) -> Row:
    """Another peer."""
    found = [index for index, i in enumerate(row) if i.peer is not None]
    if found:
        index = rng.choice(found)
        row[index] = replace(row[index], peer=rng.randint(HOST, program.n_devices))
    return row


def reslot(rng: Random, row: Row, program: Program) -> Row:
    return _other_operand(rng, row, lambda o: replace(o, slot=rng.choice([None, 0, 1, 2])))


def reslot_value(rng: Random, row: Row, program: Program) -> Row:
    """Everywhere in the row: right, unless the new slot is taken."""
    operands = [o for i in row for o in (*i.reads, *i.writes)]
    if not operands:
        return row
    value, slot = rng.choice(operands).value, rng.randint(0, 2)

    def side(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(replace(o, slot=slot) if o.value == value else o for o in operands)

    return [replace(i, reads=side(i.reads), writes=side(i.writes)) for i in row]


def revalue(rng: Random, row: Row, program: Program) -> Row:
    """Another name, micro-batch, or gradient."""

    def other(value: Value) -> Value:
        what = rng.randrange(3)
        if what == 0:
            names = [r.value for r in program.routes] + [
                f"@{rng.randrange(program.n_stages)}{rng.choice(['', '.w', '.r', '.o', '.h'])}"
            ]
            return replace(value, name=rng.choice(names))
        if what == 1:
            return replace(value, microbatch=rng.randint(0, program.n_microbatches))
        return replace(value, consumer=rng.choice([None, HOST, *range(program.n_stages)]))

    return _other_operand(rng, row, lambda o: replace(o, value=other(o.value)))


def _other_operand(rng: Random, row: Row, change: Callable[[Operand], Operand]) -> Row:
    index = rng.randrange(len(row))
    one = row[index]
    sides = [list(one.reads), list(one.writes)]
    side = rng.choice([s for s in sides if s] or [[]])
    if side:
        position = rng.randrange(len(side))
        side[position] = change(side[position])
        row[index] = replace(one, reads=tuple(sides[0]), writes=tuple(sides[1]))
    return row


def lose_operand(rng: Random, row: Row, program: Program) -> Row:
    index = rng.randrange(len(row))
    one = row[index]
    if one.op is Op.COMPUTE and (one.reads or one.writes):
        operands = rng.choice([side for side in (one.reads, one.writes) if side])
        fewer = tuple(o for o in operands if o != operands[0])
        row[index] = replace(one, reads=fewer) if operands is one.reads else replace(one, writes=fewer)
    return row


def react(rng: Random, row: Row, program: Program) -> Row:
    """Another action."""
    found = [index for index, i in enumerate(row) if i.action is not None]
    if found:
        index = rng.choice(found)
        action = row[index].action
        assert action is not None
        row[index] = replace(row[index], action=random_action(rng, action, program.n_stages, program.n_microbatches))
    return row


def retie(rng: Random, row: Row, program: Program) -> Row:
    """Lose, move or add an exchange of a tied parameter."""
    found = [index for index, i in enumerate(row) if i.tie is not None]
    if found and rng.random() < 0.7:
        instruction = row.pop(rng.choice(found))
        if rng.random() < 0.8:
            row.insert(rng.randint(0, len(row)), instruction)
    else:
        row.insert(rng.randint(0, len(row)), Instruction(rng.choice([Op.BROADCAST, Op.REDUCE]), tie=rng.choice("wux")))
    return row


def overlap(rng: Random, row: Row, program: Program) -> Row:
    """Let an action overlap with what comes after it, or no longer."""
    found = [index for index, i in enumerate(row) if i.op is Op.COMPUTE or rng.random() < 0.1]
    if found:
        index = rng.choice([i for i in found if row[i].overlaps] or found) if rng.random() < 0.5 else rng.choice(found)
        row[index] = replace(row[index], overlaps=not row[index].overlaps)
    return row


def reshard(rng: Random, row: Row, program: Program) -> Row:
    """Lose, move or add an action on parameters."""
    found = [index for index, i in enumerate(row) if i.action is not None and i.action.kind in SHARDING]
    if found and rng.random() < 0.7:
        instruction = row.pop(rng.choice(found))
        if rng.random() < 0.7:
            row.insert(rng.randint(0, len(row)), instruction)
    else:
        action = Action(rng.randrange(program.n_stages), rng.choice(SHARDING))
        row.insert(rng.randint(0, len(row)), Instruction(Op.COMPUTE, action=action))
    return row


DAMAGES = (
    drop, duplicate, swap, move, move_message, early_free, retarget, reslot, reslot_value, revalue, lose_operand, react,
    retie, overlap, reshard,
)  # fmt: skip


def damaged(rng: Random, program: Program, how: Callable[[Random, Row, Program], Row]) -> Program:
    """One damage to one row; the program may still be right, or the very same."""
    device = rng.choice([d for d, row in enumerate(program.rows) if row])
    rows = [list(row) for row in program.rows]
    rows[device] = how(rng, rows[device], program)
    return replace(program, rows=tuple(map(tuple, rows)))


def exchanged(rng: Random, program: Program) -> Program:
    """An instruction goes to another device's row."""
    rows = [list(row) for row in program.rows]
    full = [d for d, row in enumerate(rows) if row]
    source, target = rng.choice(full), rng.randrange(len(rows))
    instruction = rows[source].pop(rng.randrange(len(rows[source])))
    rows[target].insert(rng.randint(0, len(rows[target])), instruction)
    return replace(program, rows=tuple(map(tuple, rows)))


# -- damages of a schedule --------------------------------------------------------------------------------------------


def random_action(rng: Random, action: Action, n_stages: int, n_microbatches: int) -> Action:
    """Another stage, kind or micro-batch."""
    what = rng.randrange(3)
    if what == 0:
        return replace(action, stage=rng.randint(0, n_stages))
    if what == 1:
        kind = rng.choice(list(Kind))
        is_right = rng.random() < 0.8  # an action on parameters has no micro-batch
        microbatch = NO_MICROBATCH if kind in SHARDING else rng.randrange(n_microbatches)
        return Action(action.stage, kind, microbatch if is_right else action.microbatch)
    return replace(action, microbatch=rng.randint(0, n_microbatches))


SCHEDULE_DAMAGES = ("drop", "duplicate", "swap", "move", "react", "elsewhere", "overlap", "reshard")


def damaged_schedule(rng: Random, schedule: Schedule, how: str) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    row = rng.choice([row for row in rows if row])
    index, other = rng.randrange(len(row)), rng.randrange(len(row))
    match how:
        case "drop":
            del row[index]
        case "duplicate":
            row.insert(other, row[index])
        case "swap":
            row[index], row[other] = row[other], row[index]
        case "move":
            row.insert(other, row.pop(index))
        case "react":
            row[index] = random_action(rng, row[index], schedule.n_stages, schedule.n_microbatches)
        case "elsewhere":
            target = rng.choice(rows)
            target.insert(rng.randint(0, len(target)), row.pop(index))
        case "overlap":
            return replace(schedule, overlaps=_other_overlaps(rng, schedule, row))
        case "reshard":
            found = [each for each in row if each.kind in SHARDING]
            if found and rng.random() < 0.6:
                action = rng.choice(found)
                row.remove(action)
                row[other:other] = [action] * (rng.random() < 0.6)
            else:
                row.insert(other, Action(rng.randrange(schedule.n_stages), rng.choice(SHARDING)))
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _other_overlaps(rng: Random, schedule: Schedule, row: list[Action]) -> frozenset[Pair]:
    """One pair more: of neighbours, mostly a forward with a backward, or of any two actions."""
    pairs = [pair for pair in pairwise(row) if pair not in schedule.overlaps]
    likely = [pair for pair in pairs if is_pair(pair)]
    what = rng.random()
    if what < 0.7 and likely:
        return schedule.overlaps | {rng.choice(likely)}
    return schedule.overlaps | {rng.choice(pairs) if what < 0.9 and pairs else (rng.choice(row), rng.choice(row))}


# -- judgement ---------------------------------------------------------------------------------------------------------


def works(program: Program, models: tuple[str, ...] = MODELS) -> bool:
    """By the executor."""
    try:
        execute(program, models)
    except ExecutionError:
        return False
    return True


def is_legal(subject: Program | Schedule, models: tuple[str, ...] = MODELS) -> bool:
    """By the verifier."""
    try:
        verify(subject, models=models)
    except VerifyError:
        return False
    return True


def schedule_works(schedule: Schedule) -> bool:
    """By running it over a chain, each device as far as it gets: what an action needs must have run, and all once."""
    ran: Counter[str] = Counter()
    if not _runs(schedule, ran) or any(f.kind.value + b.kind.value not in ("FB", "FI") for f, b in schedule.overlaps):
        return False
    trained = any(name.strip("0123456789") not in ("F", *(kind.value for kind in SHARDING)) for name in ran)
    for s in range(schedule.n_stages):
        out, back, reduced = (ran.pop(str(Action(s, kind)), 0) for kind in SHARDING)
        if out != back or reduced > trained or (out and reduced != trained):
            return False
        for m in range(schedule.n_microbatches):
            counts = {kind.value: ran.pop(f"{s}{kind.value}{m}", 0) for kind in Kind if kind not in SHARDING}
            backward = (counts["B"], counts["I"], counts["W"])
            if counts["F"] != 1 or backward not in ([(1, 0, 0), (0, 1, 1)] if trained else [(0, 0, 0)]):
                return False
            if (
                counts["R"] > trained
                or counts["OFFLOAD"] != counts["RELOAD"]
                or counts["OFFLOAD"] > trained - counts["R"]
            ):
                return False
    return not ran


def _runs(schedule: Schedule, ran: Counter[str]) -> bool:
    """Run all rows, and say whether they end, every pair at once."""
    at, paired, moved = [0] * schedule.n_devices, 0, True
    while moved:
        moved = False
        for device, row in enumerate(schedule.rows):
            while at[device] < len(row):
                together = _together(schedule, row[at[device] : at[device] + 2])
                if not all(_may_run(schedule, device, action, ran) for action in together):
                    break
                ran.update(map(str, together))
                paired += len(together) > 1
                at[device] += len(together)
                moved = True
    return at == [len(row) for row in schedule.rows] and paired == len(schedule.overlaps)


def _together(schedule: Schedule, here: tuple[Action, ...]) -> tuple[Action, ...]:
    """The next action of a row, or two that overlap."""
    return here if here in schedule.overlaps else here[:1]


def _may_use(schedule: Schedule, action: Action, ran: Counter[str]) -> bool:
    """Whether the parameters of a stage are as an action needs them."""
    s, unshard = action.stage, Action(action.stage, Kind.UNSHARD)
    is_whole = ran[str(unshard)] > ran[f"{s}RESHARD"]
    match action.kind:
        case Kind.UNSHARD | Kind.RESHARD:
            return is_whole == (action.kind is Kind.RESHARD)
        case Kind.OFFLOAD | Kind.RELOAD | Kind.REDUCE_GRAD:
            return True
        case Kind.BACKWARD | Kind.WEIGHT_GRAD if ran[f"{s}REDUCE_GRAD"]:
            return False
        case _:
            return is_whole or not any(unshard in row for row in schedule.rows)


def _may_run(schedule: Schedule, device: int, action: Action, ran: Counter[str]) -> bool:
    s, m = action.stage, action.microbatch
    is_sharding = action.kind in SHARDING
    if not (s < schedule.n_stages and (m == NO_MICROBATCH if is_sharding else 0 <= m < schedule.n_microbatches)):
        return False
    if any(Counter(m for one in schedule.directions for m in one.microbatches)[own] > 1 for own in range(m + 1)):
        return False
    placement = next((one.placement for one in schedule.directions if m in one.microbatches), schedule.placement)
    if placement[s] != device or (schedule.directions and is_sharding) or not _may_use(schedule, action, ran):
        return False
    if is_sharding:
        return True
    again, moved = (
        any(a == Action(s, kind, m) for row in schedule.rows for a in row) for kind in (Kind.RECOMPUTE, Kind.RELOAD)
    )
    match action.kind:
        case Kind.FORWARD:
            return s == 0 or bool(ran[f"{s - 1}F{m}"])
        case Kind.RECOMPUTE:
            return bool(ran[f"{s}F{m}"])
        case Kind.WEIGHT_GRAD:
            return bool(ran[f"{s}I{m}"])
        case Kind.OFFLOAD:
            return bool(ran[f"{s}F{m}"])
        case Kind.RELOAD:
            return bool(ran[f"{s}OFFLOAD{m}"])
        case _:
            after = s + 1 == schedule.n_stages or ran[f"{s + 1}B{m}"] or ran[f"{s + 1}I{m}"]
            restored = (ran[f"{s}R{m}"] or not again) and (ran[f"{s}RELOAD{m}"] or not moved)
            return bool(ran[f"{s}F{m}"] and after and restored)
