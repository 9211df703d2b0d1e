"""The passes, each run by the one pass manager. Here the lowering: from a schedule, which says what is computed, to a
program, which says everything that a device does.

    schedule ──▶ recompute ──▶ compute ──▶ transfers ──▶ meetings ──▶ ties ──▶ liveness ──▶ (lingering) ──▶ slots ──▶ program

`split_backward` and `advance_recompute` are passes from schedule to schedule, for whoever wants them. Passes over graphs are
put together in `graphs`; this module stays free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipecompile.ir import Program, Route, Schedule, Tie, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.pass_manager import Hook, Pass, PassManager, Step, watch
from pipecompile.passes.buffer_slots import assign_slots
from pipecompile.passes.checkpointing import Checkpoint, insert_recompute
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.copy_lifetimes import let_linger
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.tied_parameters import insert_exchanges
from pipecompile.passes.transfers import insert_transfers
from pipecompile.verifiers import Level, verify, verify_program

__all__ = ["Hook", "Pass", "PassManager", "Step", "lower", "lowering", "watch"]


@without_collection
def lower(
    schedule: Schedule,
    routes: Sequence[Route] | None = None,
    *,
    ties: Sequence[Tie] = (),
    checkpoint: Checkpoint = "never",
    receive_ahead: int = 0,
    overlap: bool = False,
    dump: Callable[[str], object] | None = None,
) -> Program:
    """The program that runs `schedule`, moves the values of `routes` (a chain when None) and keeps `ties` alike.

    `checkpoint` says which forwards keep only their inputs and are run again: "never", "always", "except_last" (all
    micro-batches but the last), or a flag per stage. `overlap`: copies run beside compute, and values wait for them to be over.
    `receive_ahead` 0 posts receives as late as can be, n up to n of them
    before they are needed. `dump` is called with the text of every pass: `lower(schedule, dump=print)`. Raises VerifyError
    when the schedule, the routes or the ties are not legal.
    """
    ways = chain(schedule.n_stages) if routes is None else tuple(routes)
    verify(schedule, routes=ways)
    passes = lowering(ways, tuple(ties), checkpoint=checkpoint, receive_ahead=receive_ahead, overlap=overlap)
    program: Program = passes.run(schedule, watch(dump))
    return program


def lowering(
    routes: tuple[Route, ...],
    ties: tuple[Tie, ...] = (),
    *,
    checkpoint: Checkpoint = "never",
    receive_ahead: int = 0,
    overlap: bool = False,
) -> PassManager:
    """The pipeline of passes behind `lower`, each with what must hold after it."""

    def to(level: Level) -> Callable[[Program], None]:
        return partial(verify_program, level=level)

    first = Pass("recompute", partial(insert_recompute, checkpoint=checkpoint), partial(verify, routes=routes))
    return PassManager(
        (
            *(() if checkpoint == "never" else (first,)),
            Pass("compute", partial(lower_actions, routes=routes, ties=ties), to(Level.COMPUTE)),
            Pass("transfers", insert_transfers, to(Level.TRANSFERS)),
            Pass("meetings", partial(order_meetings, ahead=receive_ahead), to(Level.MEETINGS)),
            *((Pass("ties", insert_exchanges, to(Level.TIES)),) if ties else ()),
            Pass("liveness", insert_frees, to(Level.LIVENESS)),
            *((Pass("lingering", let_linger, to(Level.LIVENESS)),) if overlap else ()),
            Pass("slots", assign_slots, to(Level.SLOTS)),
        )
    )
