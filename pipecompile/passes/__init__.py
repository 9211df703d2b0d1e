"""The passes, each run by the one pass manager. Here the lowering: from a schedule, which says what is computed, to a
program, which says everything that a device does.

    schedule ──▶ compute ──▶ transfers ──▶ liveness ──▶ slots ──▶ program

Passes over graphs are put together in `graphs`; this module stays free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipecompile.checks import Level, verify, verify_program
from pipecompile.ir import Program, Route, Schedule, chain
from pipecompile.passes.compute import lower_actions
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.manager import Hook, Pass, PassManager, Step, watch
from pipecompile.passes.slots import assign_slots
from pipecompile.passes.transfers import insert_transfers

__all__ = ["Hook", "Pass", "PassManager", "Step", "lower", "lowering", "watch"]


def lower(
    schedule: Schedule, routes: Sequence[Route] | None = None, *, dump: Callable[[str], object] | None = None
) -> Program:
    """The program that runs `schedule` and moves the values of `routes` (a chain when None).

    `dump` is called with the text of every pass: `lower(schedule, dump=print)`. Raises VerifyError when the schedule
    or the routes are not legal.
    """
    ways = chain(schedule.n_stages) if routes is None else tuple(routes)
    verify(schedule, routes=ways)
    program: Program = lowering(ways).run(schedule, watch(dump))
    return program


def lowering(routes: tuple[Route, ...]) -> PassManager:
    """The pipeline of passes behind `lower`, each with what must hold after it."""
    return PassManager(
        (
            Pass("compute", partial(lower_actions, routes=routes), partial(verify_program, level=Level.COMPUTE)),
            Pass("transfers", insert_transfers, partial(verify_program, level=Level.TRANSFERS)),
            Pass("liveness", insert_frees, partial(verify_program, level=Level.LIVENESS)),
            Pass("slots", assign_slots, partial(verify_program, level=Level.SLOTS)),
        )
    )
