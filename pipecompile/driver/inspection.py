"""How a pipeline is looked at: the costs of its step, the dump of everything, the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipecompile.passes import lower
from pipecompile.planning.schedule_choice import costs_of
from pipecompile.planning.what_if import what_if
from pipecompile.show import dump, report_html, write_text
from pipecompile.simulation.advice import advise
from pipecompile.simulation.costs import CostOptions

if TYPE_CHECKING:
    from pipecompile.pipeline import Pipeline

__all__ = ["dump_all", "report_of", "step_costs", "write_report"]


def step_costs(pipe: Pipeline) -> CostOptions:
    """What `simulate` takes, from the plan."""
    return costs_of(pipe.plan.stages, pipe.program.routes, pipe.options.links, pipe.plan.placement)


def dump_all(pipe: Pipeline, directory: str | Path) -> list[Path]:
    """All files of `Pipeline.dump`."""
    changes: list[str] = []
    lower(pipe.schedule, pipe.program.routes, overlap=pipe.builds.latest.overlap, dump=changes.append)
    return dump(
        directory,
        plan=pipe.plan,
        graph=pipe.graph,
        schedule=pipe.schedule,
        program=pipe.program,
        predicted=pipe.simulate(),
        measured=pipe.measured,
        passes="\n".join(changes),
        report=report_of(pipe),
    )


def write_report(pipe: Pipeline, path: str | Path) -> Path:
    """The page of `Pipeline.report`, whole or not at all. Raises InputError if it cannot be written."""
    return write_text(Path(path), report_of(pipe))


def report_of(pipe: Pipeline) -> str:
    return report_html(
        pipe.schedule,
        pipe.simulate(),
        pipe.measured,
        plan=pipe.plan,
        graph=pipe.graph,
        advice=advise(pipe.program, **step_costs(pipe)),
        what_if=what_if(
            pipe.plan, pipe.problem, pipe.schedule, pipe.options.links.seconds(pipe.plan.routes, pipe.plan.placement)
        ),
        title=type(pipe.model).__name__,
    )
