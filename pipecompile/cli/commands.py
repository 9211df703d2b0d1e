"""The nine commands: check, plan, simulate, run, schedule, bench, show, hang and env."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipecompile import __version__
from pipecompile.cli.check_subject import CheckSubject
from pipecompile.cli.command_report import (
    CommandReport,
    check_report,
    plan_report,
    run_report,
    schedule_report,
    simulate_report,
)
from pipecompile.cli.compile_options import CompileOptions, checkpoint_of, with_classes
from pipecompile.cli.exit_codes import conclude, faults_of_file
from pipecompile.cli.load_model import ModelSource
from pipecompile.cli.out_folder import file_of, folder_of
from pipecompile.cli.plain_schedule import plain_schedule
from pipecompile.cli.shared_options import spread
from pipecompile.cli.show_file import show_report
from pipecompile.errors import InputError
from pipecompile.text.progress import switched, task
from pipecompile.text.units import counted

if TYPE_CHECKING:
    import torch

    from pipecompile.graph.explanation import Explanation
    from pipecompile.pipeline import Pipeline

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Cut a PyTorch model into pipeline stages, schedule them, simulate and run them.",
)

Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", parser=folder_of, help="directory for the files of the result")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


def print_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted`."""
    if wanted:
        typer.echo(f"pipecompile {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
@spread
def check(
    subject: CheckSubject,
    evaluate: Annotated[bool, typer.Option("--eval", help="in evaluation mode, not in training")] = False,
    as_json: Json = False,
) -> None:
    """Check that MODEL can be recorded: its nodes, the parts kept whole and why, its risks.

    Or check the pipeline in FILE, which another framework wrote: its faults, deadlocks, peaks, and distance to the best.
    """

    def work() -> CommandReport:
        if subject.is_pipeline:
            return subject.pipeline_report(evaluate)
        return check_report(_explain(subject.source, evaluate))

    conclude(as_json, work)


@app.command()
@spread
def plan(
    source: ModelSource,
    options: CompileOptions,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="show the layouts of a cluster instead: 8xH100, 4x8xA100")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Cut MODEL and show memory, time and transfers of every stage; or show what it would take on a cluster."""

    def work() -> CommandReport:
        if cluster is None:
            return plan_report(_compile(source, options).pipe, out)
        return _plan_for(source, cluster, options, out)

    conclude(as_json, work, out)


@app.command()
@spread
def simulate(source: ModelSource, options: CompileOptions, out: Out = None, as_json: Json = False) -> None:
    """Predict makespan, bubble and memory of MODEL under a schedule, and draw the schedule."""

    def work() -> CommandReport:
        import pipecompile

        pipe = _compile(source, options).pipe
        return simulate_report(pipe, pipecompile.simulate(pipe.schedule), out)

    conclude(as_json, work, out)


@app.command()
@spread
def run(
    source: ModelSource,
    options: CompileOptions,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 3,
    compare: Annotated[bool, typer.Option(help="also train a copy without the pipeline")] = True,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train MODEL for some steps on random data and compare it with a plain micro-batched loop."""
    conclude(as_json, lambda: _run(source, options, steps, compare, out), out)


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="gpipe, 1f1b, ...; auto: search for one; or a file: mine.csv"),
    ],
    stages: Annotated[int | None, typer.Option(help="number of stages; default: 4")] = None,
    microbatches: Annotated[int | None, typer.Option(help="number of micro-batches; default: 8")] = None,
    devices: Annotated[
        int | None, typer.Option(help="number of devices; default: one per stage, or one per two stages in a V")
    ] = None,
    slices: Annotated[
        int | None, typer.Option(help="slices along the sequence of each micro-batch, for seq1f1b, ...; default: 4")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="MODE", help="never, always, except_last, or a flag per stage: 1,1,0,0")
    ] = "never",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Draw the schedule NAME in unit time and print its CSV. A file is checked first. No model is needed."""

    def work() -> CommandReport:
        import pipecompile

        with faults_of_file(name):
            built = plain_schedule(name, stages, microbatches, devices, slices, checkpoint_of(checkpoint))
            return schedule_report(built, pipecompile.simulate(built), out)

    conclude(as_json, work, out)


@app.command()
@spread
def bench(
    source: ModelSource,
    options: CompileOptions,
    steps: Annotated[int, typer.Option(min=1, help="steps that are timed, after two that are not")] = 10,
    as_json: Json = False,
) -> None:
    """Time steps of MODEL in the pipeline and in a plain loop over micro-batches, beside the prediction."""

    def work() -> CommandReport:
        from pipecompile.cli.step_benchmark import bench_report

        compiled = _compile(source, options, with_twin=True)
        with switched(options.progress), task(f"timing {counted(steps, 'step')}"):
            return bench_report(compiled.pipe, compiled.twin, compiled.args, steps)

    conclude(as_json, work)


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", parser=file_of, help="plan.json, schedule.csv or program.txt of an --out")
    ],
    as_json: Json = False,
) -> None:
    """Show a plan, a schedule or a program from its file. No model is needed."""
    conclude(as_json, lambda: show_report(file))


@app.command()
def hang(
    dumps: Annotated[
        list[Path], typer.Argument(metavar="DUMP...", parser=file_of, help="one per rank, of torch's flight recorder")
    ],
    program: Annotated[Path, typer.Option(metavar="FILE", parser=file_of, help="program.txt of pipe.dump")],
    ranks: Annotated[str | None, typer.Option(metavar="RANK,...", help="ranks of the pipeline by device")] = None,
    as_json: Json = False,
) -> None:
    """Say at which SEND or RECV of a program its ranks hang, and which rank is the cause."""
    from pipecompile.cli.hang_dumps import dumps_report

    conclude(as_json, lambda: dumps_report(dumps, program, ranks))


@app.command()
def env(as_json: Json = False) -> None:
    """Show versions, devices, and what has been proven on them."""
    from pipecompile.cli.environment import environment_report

    conclude(as_json, environment_report)


def main() -> None:
    """Run the `pipecompile` command."""
    app()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A pipeline with its model, an unchanged copy of the model for `run --compare`, and the example inputs."""

    pipe: Pipeline
    model: torch.nn.Module
    twin: torch.nn.Module | None
    args: tuple[torch.Tensor, ...]


def _explain(source: ModelSource, evaluate: bool) -> Explanation:
    import pipecompile

    with task(f"loading and recording {source.model}"):
        model, args = source.load()
        return pipecompile.explain(model.train(not evaluate), *args)


def _plan_for(source: ModelSource, cluster: str, options: CompileOptions, out: Path | None) -> CommandReport:
    """Report the layouts of a cluster; the input of MODEL is the mini-batch of all devices together.

    Raise InputError for options of a single layout.
    """
    import pipecompile

    given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    shared = ("optimizer", "progress")
    if others := [name for name in given if name not in shared] + ["out"] * (out is not None):
        words = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise InputError(f"{words} cannot be used with --cluster", why="it compares layouts, each with its own stages")
    with switched(options.progress), task(f"planning {source.model} for {cluster}"):
        model, args = source.load()
        layouts = pipecompile.plan_for(model, cluster, example_args=args, optimizer=options.optimizer or "adamw")
    rows = [asdict(row) | {"step": row.seconds.total, "line": row.line} for row in layouts.rows]
    return CommandReport(
        {"cluster": str(layouts.cluster), "samples": layouts.samples, "layouts": rows}, (str(layouts),)
    )


def _compile(source: ModelSource, options: CompileOptions, *, with_twin: bool = False) -> _Compiled:
    import copy

    import pipecompile
    from pipecompile.cli.training_trial import synthetic_loss

    keywords = options.arguments()
    with switched(options.progress), task(f"compiling {source.model}"):
        model, args = source.load()
        twin = copy.deepcopy(model) if with_twin else None
        keywords["keep_together"] = with_classes(model, keywords["keep_together"])
        with faults_of_file(options.schedule):
            pipe = pipecompile.compile(model, example_args=args, loss_fn=synthetic_loss, **keywords)
    return _Compiled(pipe, model, twin, args)


def _run(source: ModelSource, options: CompileOptions, steps: int, compare: bool, out: Path | None) -> CommandReport:
    from pipecompile.cli.training_trial import optimizer_named, train

    optimizer = optimizer_named(options.optimizer or "sgd")
    compiled = _compile(source, options, with_twin=compare)
    with switched(options.progress), task(f"training {counted(steps, 'step')}"):
        trial = train(compiled.pipe, compiled.model, compiled.twin, compiled.args, steps, source.seed, optimizer)
    return run_report(compiled.pipe, trial, out)
