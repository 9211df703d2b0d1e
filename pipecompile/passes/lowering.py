"""The lowering: from a schedule, which lists computation, to a program, which lists everything that a device does.

    schedule ──▶ recompute ──▶ compute ──▶ transfers ──▶ meetings ──▶ ties ──▶ liveness ──▶ (lingering) ──▶ slots ──▶ program

The pass manager runs the passes and verifies the result of each at its level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipecompile.errors import VerifyError
from pipecompile.ir import Program, Route, Schedule, Tie
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.pass_manager import Hook, Pass, PassManager, Step, watch
from pipecompile.ir.routes import Sums
from pipecompile.passes.buffer_slots import assign_slots
from pipecompile.passes.checkpointing import Checkpoint, insert_recompute
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.copy_lifetimes import let_linger
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.tied_parameters import insert_exchanges
from pipecompile.passes.transfers import insert_transfers
from pipecompile.text.input_checks import known_names, whole
from pipecompile.verifiers import Level, verify, verify_program
from pipecompile.verifiers.routes import route_sequence
from pipecompile.verifiers.tied_parameters import tie_sequence

if TYPE_CHECKING:
    from pipecompile.passes.user_passes import UserPass

__all__ = ["Hook", "Pass", "PassManager", "Step", "lower", "lowering", "watch"]

_MOST_AHEAD = 1_000_000
"""Receives that may be posted early: the most micro-batches of a step."""


@without_collection
def lower(
    schedule: Schedule,
    routes: Sequence[Route] | None = None,
    *,
    ties: Sequence[Tie] = (),
    checkpoint: Checkpoint = "never",
    receive_ahead: int = 0,
    overlap: bool = False,
    sums: Sums = "eager",
    passes: Sequence[UserPass] = (),
    dump: Callable[[str], object] | None = None,
) -> Program:
    """Return the program that runs `schedule`, moves the values of `routes` (a chain if None) and synchronises `ties`.

    `checkpoint` says which forwards keep only their inputs and are recomputed: "never", "always", "except_last" (all micro-batches
    but the last), or a flag per stage. `receive_ahead` is the number of receives that may be posted before their values are needed;
    0 posts each receive as late as possible. With `overlap`, copies run beside compute, and values live until their copies are
    over. `sums` says which gradients of a value a device adds up before it sends them: "eager", where the order of eager autograd
    stays, or "device", all. `passes` are those of the user. `dump` is called with the text of every pass: `lower(schedule,
    dump=print)`. The slices of a schedule of slices are numbered over all micro-batches. Raise VerifyError if the schedule, the
    routes or the ties are not legal.
    """
    verify(schedule, routes=routes)
    all_routes = route_sequence(routes, schedule.n_stages)
    manager = lowering(
        all_routes, tie_sequence(ties), checkpoint=checkpoint, receive_ahead=receive_ahead, overlap=overlap, sums=sums
    )
    if passes:
        from pipecompile.passes.user_passes import placed

        verifiers = partial(_verifier_of_gap, routes=all_routes, overlap=overlap)
        manager = PassManager(placed(manager.passes, passes, verifiers))
    program: Program = manager.run(schedule, watch(dump))
    return program


def _reasons(kind: str, ahead: int, before: Program, after: Program) -> Iterable[str]:
    """Return the reasons for the places of messages and frees after a pass of this kind. The module is imported only for dumps."""
    from pipecompile.passes import message_reasons

    if kind == "meeting":
        return message_reasons.meeting_reasons(before, after, ahead)
    lines: Iterable[str] = getattr(message_reasons, f"{kind}_reasons")(before, after)
    return lines


def _verifier_of_gap(gap: int, *, routes: tuple[Route, ...], overlap: bool) -> Callable[[Any], None]:
    """Return the verifier of what a pass of the user makes after the first `gap` of the passes that there are: a schedule up to 1."""
    if gap <= 1:
        return partial(verify, routes=routes)
    levels = (Level.COMPUTE, Level.TRANSFERS, Level.MEETINGS, Level.TIES, Level.LIVENESS, Level.LIVENESS, Level.SLOTS)
    level = levels[gap - 2]
    return partial(_verify_lingering, level=level) if overlap and gap > 6 else partial(verify_program, level=level)


def _verify_lingering(program: Program, level: Level) -> None:
    """Verify a program for devices whose copies run beside compute: received values stay until what may hold them is freed."""
    from pipecompile.verifiers.received_values import received_faults

    verify_program(program, level)
    if faults := [*received_faults(program)]:
        raise VerifyError("program", faults)


def lowering(
    routes: tuple[Route, ...],
    ties: tuple[Tie, ...] = (),
    *,
    checkpoint: Checkpoint = "never",
    receive_ahead: int = 0,
    overlap: bool = False,
    sums: Sums = "eager",
) -> PassManager:
    """Return the passes behind `lower`, each with the verifier of the level that it reaches."""
    known_names("sums:", [sums], ("eager", "device"))
    ahead = whole("receive_ahead", receive_ahead, 0, _MOST_AHEAD)

    def reaches(level: Level) -> Callable[[Program], None]:
        return partial(verify_program, level=level)

    compute = partial(_computed, routes=routes, ties=ties, sums=sums)
    ordered = partial(order_meetings, ahead=ahead)
    recompute = Pass("recompute", partial(insert_recompute, checkpoint=checkpoint), partial(verify, routes=routes))
    lingering = Pass("lingering", let_linger, reaches(Level.LIVENESS), partial(_reasons, "lingering", 0))
    return PassManager(
        (
            *(() if isinstance(checkpoint, str) and checkpoint == "never" else (recompute,)),
            Pass("compute", compute, reaches(Level.COMPUTE)),
            Pass("transfers", insert_transfers, reaches(Level.TRANSFERS), partial(_reasons, "transfer", 0)),
            Pass("meetings", ordered, reaches(Level.MEETINGS), partial(_reasons, "meeting", ahead)),
            *((Pass("ties", insert_exchanges, reaches(Level.TIES)),) if ties else ()),
            Pass("liveness", insert_frees, reaches(Level.LIVENESS), partial(_reasons, "free", 0)),
            *((lingering,) if overlap else ()),
            Pass("slots", assign_slots, reaches(Level.SLOTS)),
        )
    )


def _computed(schedule: Schedule, *, routes: tuple[Route, ...], ties: tuple[Tie, ...], sums: Sums) -> Program:
    """Return the computations of a program, over routes whose gradients are added up as `sums` says."""
    if not any(len(route.consumers) > 1 and route.gradient for route in routes):
        return lower_actions(schedule, routes, ties)
    from pipecompile.passes.gradient_sums import with_sums

    return lower_actions(schedule, with_sums(schedule, routes, sums), ties)
