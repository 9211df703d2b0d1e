"""Steps that run a program of the user: it must be legal, and move the values of this model, as it is cut, where they are needed.

verify_written    before anything is recorded: the program by itself, faults with the line of the file
fitted            once the model is cut: the routes of the program are those of the step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.driver.specialization import Specialization
from pipecompile.errors import ScheduleError
from pipecompile.ir import Program, Route
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes.gradient_sums import with_sums
from pipecompile.verifiers.received_values import received_faults

__all__ = ["fitted"]

_SHOWN = 8
"""Number of differences listed. A program of another model differs in every line."""


def fitted(written: WrittenProgram, specialization: Specialization, routes: Sequence[Route]) -> Program:
    """Return the user's program, with the sizes of `routes`, those of the step. Raise ScheduleError with the lines that do not fit."""
    faults = [*_route_faults(written, routes)]
    if not faults:
        faults += _sum_faults(written, specialization.options.gradient_sums, routes)
        faults += received_faults(written.program) if specialization.is_overlapped else ()
    if faults:
        shown = [written.located(fault) for fault in faults[:_SHOWN]]
        shown += [f"and {len(faults) - _SHOWN} more"] * (len(faults) > _SHOWN)
        raise ScheduleError(
            f"{written.source} does not fit the model as it is cut",
            where="\n         ".join(shown),
            why="a step runs a program that moves the very values of its stages",
            hint="edit the program.txt that pipe.dump writes after a step, and compile with the plan.json beside it: plan=...",
        )
    own = {route.value: route for route in written.program.routes}
    return replace(written.program, routes=tuple(replace(route, sums=own[route.value].sums) for route in routes))


def _route_faults(written: WrittenProgram, routes: Sequence[Route]) -> Iterator[str]:
    """Yield the routes of the program that the step has not, or otherwise, and those that it lacks."""
    own, others = ({route.value: route for route in each} for each in (written.program.routes, routes))
    for value, route in own.items():
        if value not in others:
            yield f"{route}: the step has no such value"
        elif _way(route) != _way(others[value]):
            yield f"{route}: in the step it is {others[value]}"
    yield from (f"the program lacks {route}" for value, route in others.items() if value not in own)
    for tie in written.program.ties:
        yield f"{tie}: a pipeline refreshes and reduces tied parameters itself, before and after its program"


def _way(route: Route) -> tuple[int, tuple[int, ...], bool]:
    return route.source, route.consumers, route.gradient


def _sum_faults(written: WrittenProgram, sums: str, routes: Sequence[Route]) -> Iterator[str]:
    """Yield each sum of gradients that rounds otherwise than eager autograd, if gradients are to be added in eager's order."""
    if sums == "device":
        return
    eager = {route.value: route.sums for route in with_sums(written.plain, routes, "eager")}
    for route in written.program.routes:
        if not set(route.sums) <= set(eager[route.value]):
            yield f'{route}: eager autograd adds these gradients in another order; gradient_sums="device" allows it'
