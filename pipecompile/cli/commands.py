"""The five commands and their options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipecompile.cli.compile_options import Checkpoint, Request, checkpoint_of, schedule_of, with_classes
from pipecompile.cli.exit_codes import conclude, working
from pipecompile.cli.load_model import Source
from pipecompile.cli.report import Report, explained, planned, scheduled, simulated, trained
from pipecompile.cli.shared_options import spread
from pipecompile.errors import InputError

if TYPE_CHECKING:
    import torch

    from pipecompile.graph.explanation import Explanation
    from pipecompile.ir import Schedule
    from pipecompile.pipeline import Pipeline

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cut a PyTorch model into pipeline stages, schedule them, simulate and run them.",
)

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="write everything there as files")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@app.command()
@spread
def check(
    source: Source,
    evaluate: Annotated[bool, typer.Option("--eval", help="in evaluation mode, not in training")] = False,
    as_json: Json = False,
) -> None:
    """Can MODEL be recorded? Show what was, what stays whole and why, and what to look out for."""
    conclude(as_json, lambda: explained(_explain(source, evaluate)))


@app.command()
@spread
def plan(source: Source, request: Request, out: Out = None, as_json: Json = False) -> None:
    """Cut MODEL and show what every stage holds, takes and sends."""
    conclude(as_json, lambda: planned(_compile(source, request).pipe, out))


@app.command()
@spread
def simulate(source: Source, request: Request, out: Out = None, as_json: Json = False) -> None:
    """Predict makespan, bubble and memory of MODEL under a schedule, and draw the schedule."""

    def work() -> Report:
        import pipecompile

        pipe = _compile(source, request).pipe
        return simulated(pipe, pipecompile.simulate(pipe.schedule), out)

    conclude(as_json, work)


@app.command()
@spread
def run(
    source: Source,
    request: Request,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 3,
    compare: Annotated[bool, typer.Option(help="train a copy without the pipeline beside it")] = True,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train MODEL for some steps on random data and compare it with a plain micro-batched loop."""
    conclude(as_json, lambda: _run(source, request, steps, compare, out))


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="gpipe, 1f1b, ...; auto: search for one; or a file of your own: mine.csv"),
    ],
    stages: Annotated[int, typer.Option(help="pieces of the model")] = 4,
    microbatches: Annotated[int, typer.Option(help="slices of the batch")] = 8,
    devices: Annotated[
        int | None, typer.Option(help="default: one per stage, or per two where they are in a V")
    ] = None,
    checkpoint: Checkpoint = "never",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Draw the schedule NAME in unit time, and print its CSV; of a file, check it and say what is wrong. No model needed."""

    def work() -> Report:
        import pipecompile

        built = _schedule(name, stages, microbatches, devices, checkpoint_of(checkpoint))
        return scheduled(built, pipecompile.simulate(built), out)

    conclude(as_json, work)


def main() -> None:
    """The entry point of the `pipecompile` command."""
    app()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A pipeline with the model it was made of, an untouched copy of that if asked for, and the example inputs."""

    pipe: Pipeline
    model: torch.nn.Module
    twin: torch.nn.Module | None
    args: tuple[torch.Tensor, ...]


def _explain(source: Source, evaluate: bool) -> Explanation:
    import pipecompile

    with working(f"recording {source.model}"):
        model, args = source.load()
        return pipecompile.explain(model.train(not evaluate), *args)


def _compile(source: Source, request: Request, *, with_twin: bool = False) -> _Compiled:
    import copy

    import pipecompile
    from pipecompile.cli.training_trial import synthetic_loss

    wanted = request.arguments()
    with working(f"compiling {source.model}"):
        model, args = source.load()
        twin = copy.deepcopy(model) if with_twin else None
        wanted["keep_together"] = with_classes(model, wanted["keep_together"])
        pipe = pipecompile.compile(model, example_args=args, loss_fn=synthetic_loss, **wanted)
    return _Compiled(pipe, model, twin, args)


def _run(source: Source, request: Request, steps: int, compare: bool, out: Path | None) -> Report:
    from pipecompile.cli.training_trial import optimizer_named, train

    optimizer = optimizer_named(request.optimizer or "sgd")
    made = _compile(source, request, with_twin=compare)
    with working(f"training {steps} steps"):
        trial = train(made.pipe, made.model, made.twin, made.args, steps, source.seed, optimizer)
    return trained(made.pipe, trial, out)


def _schedule(
    name: str, stages: int, microbatches: int, devices: int | None, checkpoint: str | tuple[bool, ...]
) -> Schedule:
    """The schedule without a model, in which memory has no bytes that could demand anything."""
    import pipecompile
    from pipecompile.passes.checkpointing import insert_recompute

    if checkpoint == "auto":
        raise InputError("--checkpoint auto needs a model", why="its memory decides", hint="plan, simulate or run")
    built = schedule_of(name)
    if built == "auto":
        built = pipecompile.auto_schedule(stages, microbatches, n_devices=devices)
    elif isinstance(built, str):
        built = pipecompile.build_schedule(built, stages, microbatches, n_devices=devices)
    return insert_recompute(built, checkpoint)
