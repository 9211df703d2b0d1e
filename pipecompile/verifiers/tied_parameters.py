"""Verifier of ties: every copy of a tied parameter is refreshed before its use, its gradient reduced after the last
use.

    tie w: 0 2        device of stage 0 │ BROADCAST w … 0F0 … 0B7 … REDUCE w
                      device of stage 2 │ BROADCAST w … 2F0 … 2B7 … REDUCE w

Once each, on every device that has one of the stages, if there are several devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from pipecompile.errors import InputError
from pipecompile.ir import SHARDING, UNTRAINED, Instruction, Op, Program, Tie
from pipecompile.ir.directions import all_placements
from pipecompile.text.shown_value import shown
from pipecompile.verifiers.routes import is_name

__all__ = ["exchange_faults", "tie_faults", "tie_sequence"]


def tie_sequence(ties: object) -> tuple[Tie, ...]:
    """Return the ties that a caller passes, not checked. Raise InputError if they are no sequence of ties."""
    each = tuple(ties) if isinstance(ties, Sequence) and not isinstance(ties, str) else (None,)
    if all(isinstance(tie, Tie) for tie in each):
        return each
    raise InputError(f"ties={shown(ties)} is not a sequence of ties", hint="ties=()")


def tie_faults(ties: Sequence[Tie], n_stages: int) -> list[str]:
    """Return all faults of the ties by themselves."""
    counts = Counter(tie.name for tie in ties)
    twice = [f"{count} ties are called {shown(name)}" for name, count in counts.items() if count > 1]
    return [*twice, *(f"{tie}: {fault}" for tie in ties for fault in _faults(tie, n_stages))]


def _faults(tie: Tie, n_stages: int) -> Iterator[str]:
    if not is_name(tie.name):
        yield f"{shown(tie.name)} is not a name: no spaces, no # ' [ ]"
    if not (math.isfinite(tie.nbytes) and tie.nbytes >= 0):
        yield "the size must be finite and not negative"
    if outside := [stage for stage in tie.stages if not 0 <= stage < n_stages]:
        yield f"there is no stage {outside[0]}, stages are 0 to {n_stages - 1}"
    if len(tie.stages) < 2 or list(tie.stages) != sorted(set(tie.stages)):
        yield "two or more stages, in ascending order, each once"


def exchange_faults(program: Program) -> Iterator[str]:
    """Yield every BROADCAST and REDUCE that is missing, superfluous, too late or too early."""
    trained = any(i.action is not None and i.action.kind not in UNTRAINED for row in program.rows for i in row)
    exchanged = {tie.name: tie for tie in program.ties if len(tie.devices(*all_placements(program))) > 1}
    for device, row in enumerate(program.rows):
        for index, instruction in enumerate(row):
            if instruction.op in (Op.BROADCAST, Op.REDUCE):
                tie = exchanged.get(instruction.tie or "")
                if tie is None or device not in tie.devices(*all_placements(program)):
                    yield f"device {device}, step {index}, {instruction}: this device has no such tie to exchange"
    for tie in exchanged.values():
        for device in tie.devices(*all_placements(program)):
            yield from _of_device(tie, device, program.rows[device], trained=trained)


def _of_device(tie: Tie, device: int, row: Sequence[Instruction], *, trained: bool) -> Iterator[str]:
    actions = ((index, i.action) for index, i in enumerate(row) if i.action is not None)
    uses = [index for index, action in actions if action.stage in tie.stages and action.kind not in SHARDING]
    for op, expected in ((Op.BROADCAST, 1), (Op.REDUCE, int(trained))):
        indices = [index for index, i in enumerate(row) if i.op is op and i.tie == tie.name]
        if len(indices) != expected:
            times = f"{len(indices)} time{'s' * (len(indices) != 1)}"
            yield f"device {device}: {op.value} {tie.name} occurs {times}, expected {expected}"
        for index in indices:
            if op is Op.BROADCAST and any(use < index for use in uses):
                yield f"device {device}, step {index}, {row[index]}: comes after {row[uses[0]].action}, which uses it"
            if op is Op.REDUCE and any(use > index for use in uses):
                yield f"device {device}, step {index}, {row[index]}: comes before {row[uses[-1]].action}, which adds to its gradient"
