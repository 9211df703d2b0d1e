"""The five commands and their options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipecompile.cli.outcome import conclude, working
from pipecompile.cli.report import Report, explained, planned, scheduled, simulated, trained
from pipecompile.cli.request import Request

if TYPE_CHECKING:
    import torch

    from pipecompile.explanation import Explanation
    from pipecompile.pipeline import Pipeline

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cut a PyTorch model into pipeline stages, schedule them, simulate and run them.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME or package.module:factory")]
Inputs = Annotated[
    list[str], typer.Option("--input", metavar="SHAPE[:DTYPE]", help="32x3x224x224, 2x128:int64; one each")
]
Stages = Annotated[int, typer.Option(help="pieces of the model")]
Microbatches = Annotated[int | None, typer.Option(help="slices of the batch; default: twice the number of devices")]
ScheduleName = Annotated[str, typer.Option("--schedule", help="gpipe, 1f1b, ..., or a file: mine.csv")]
Partitioner = Annotated[str, typer.Option(help="auto, dp or ilp")]
Cost = Annotated[str, typer.Option(help="auto, analytic or profile")]
MemoryLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="of a stage, such as 2GiB")]
Devices = Annotated[
    str | None, typer.Option(metavar="D,D,...", help="one per stage, repeats allowed; default: the GPUs")
]
Seed = Annotated[int, typer.Option(help="of the weights and the random data")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="write everything there as files")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@app.command()
def check(
    model: Model, inputs: Inputs,
    evaluate: Annotated[bool, typer.Option("--eval", help="in evaluation mode, not in training")] = False,
    seed: Seed = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Can MODEL be recorded? Show what was, what stays whole and why, and what to look out for."""
    conclude(as_json, lambda: explained(_explain(Request.of(model, inputs, seed), evaluate)))


@app.command()
def plan(
    model: Model, inputs: Inputs, stages: Stages = 4, microbatches: Microbatches = None,
    schedule: ScheduleName = "1f1b", partitioner: Partitioner = "auto", cost: Cost = "auto",
    memory_limit: MemoryLimit = None, devices: Devices = None,
    seed: Seed = 0, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Cut MODEL and show what every stage holds, takes and sends."""
    request = Request(model, inputs, stages, microbatches, schedule, partitioner, cost, memory_limit, devices, seed)
    conclude(as_json, lambda: planned(_compile(request).pipe, out))


@app.command()
def simulate(
    model: Model, inputs: Inputs, stages: Stages = 4, microbatches: Microbatches = None,
    schedule: ScheduleName = "1f1b", partitioner: Partitioner = "auto", cost: Cost = "auto",
    memory_limit: MemoryLimit = None, devices: Devices = None,
    seed: Seed = 0, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Predict makespan, bubble and memory of MODEL under a schedule, and draw the schedule."""
    request = Request(model, inputs, stages, microbatches, schedule, partitioner, cost, memory_limit, devices, seed)

    def work() -> Report:
        import pipecompile

        pipe = _compile(request).pipe
        return simulated(pipe, pipecompile.simulate(pipe.schedule), out)

    conclude(as_json, work)


@app.command()
def run(
    model: Model, inputs: Inputs, stages: Stages = 4, microbatches: Microbatches = None,
    schedule: ScheduleName = "1f1b", partitioner: Partitioner = "auto", cost: Cost = "auto",
    memory_limit: MemoryLimit = None, devices: Devices = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 3,
    compare: Annotated[bool, typer.Option(help="train a copy without the pipeline beside it")] = True,
    seed: Seed = 0, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train MODEL for some steps on random data and compare it with a plain micro-batched loop."""
    request = Request(model, inputs, stages, microbatches, schedule, partitioner, cost, memory_limit, devices, seed)
    conclude(as_json, lambda: _run(request, steps, compare, out))


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, ..., or a file of your own: mine.csv")],
    stages: Stages = 4,
    microbatches: Annotated[int, typer.Option(help="slices of the batch")] = 8,
    devices: Annotated[
        int | None, typer.Option(help="default: one per stage, or per two where they are in a V")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Draw the schedule NAME in unit time, and print its CSV; of a file, check it and say what is wrong. No model needed."""

    def work() -> Report:
        import pipecompile

        if name.endswith(".csv"):
            built = pipecompile.Schedule.load(name)
        else:
            built = pipecompile.build_schedule(name, stages, microbatches, n_devices=devices)
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


def _explain(request: Request, evaluate: bool) -> Explanation:
    import pipecompile

    with working(f"recording {request.model}"):
        model, args = request.load()
        return pipecompile.explain(model.train(not evaluate), *args)


def _compile(request: Request, *, with_twin: bool = False) -> _Compiled:
    import copy

    import pipecompile
    from pipecompile.cli.trial import synthetic_loss

    options = request.options()
    with working(f"compiling {request.model}"):
        model, args = request.load()
        twin = copy.deepcopy(model) if with_twin else None
        pipe = pipecompile.compile(model, request.stages, example_args=args, loss_fn=synthetic_loss, **options)
    return _Compiled(pipe, model, twin, args)


def _run(request: Request, steps: int, compare: bool, out: Path | None) -> Report:
    from pipecompile.cli.trial import train

    made = _compile(request, with_twin=compare)
    with working(f"training {steps} steps"):
        trial = train(made.pipe, made.model, made.twin, made.args, steps, request.seed)
    return trained(made.pipe, trial, out)
