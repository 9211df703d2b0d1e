"""The command line: a thin skin over `compile`, `build_schedule` and `simulate`.

    pipecompile plan|simulate|run MODEL --input 32x3x224x224 --stages 4 ...      pipecompile schedule 1f1b --stages 4

stdout carries the result and nothing else (what a model prints goes to stderr); errors go to stderr without a traceback.
Exit codes: 0 good, 1 failed otherwise, 2 usage, 3 the model cannot be traced, 4 no cut fits. torch is imported by the
commands that need it, never for `--help`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pipecompile.errors import InputError, PartitionError, PipecompileError, PlanError, ScheduleError, TraceError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from pipecompile.pipeline import Pipeline
    from pipecompile.timeline import Timeline

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Cut a PyTorch model into pipeline stages, schedule them, simulate and run them.",
)  # fmt: skip

_EXIT_CODES = {InputError: 2, ScheduleError: 2, PlanError: 2, TraceError: 3, PartitionError: 4}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME or package.module:factory")]
Inputs = Annotated[list[str], typer.Option("--input", metavar="SHAPE[:DTYPE]", help="32x3x224x224; one per input")]
Stages = Annotated[int, typer.Option(help="pieces to cut the model into")]
Microbatches = Annotated[int | None, typer.Option(help="slices of the batch; default: twice the number of devices")]
ScheduleName = Annotated[str, typer.Option("--schedule", help="gpipe, 1f1b, ...")]
Partitioner = Annotated[str, typer.Option(help="auto, dp or ilp")]
Cost = Annotated[str, typer.Option(help="auto, analytic or profile")]
MemoryLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="per stage, such as 2GiB")]
Devices = Annotated[str | None, typer.Option(metavar="D,D,...", help="such as cuda:0,cuda:1 or cpu,cpu")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="write plan, schedule, program, pictures here")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of text")]
Seed = Annotated[int, typer.Option(help="of the weights and the random data")]


@dataclass(frozen=True, slots=True)
class _Request:
    """What `plan`, `simulate` and `run` have in common, as typed."""

    model: str
    inputs: list[str]
    stages: int
    microbatches: int | None
    schedule: str
    partitioner: str
    cost: str
    memory_limit: str | None
    devices: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class _Report:
    """A command's result: for programs, and for people."""

    data: dict[str, Any]
    blocks: tuple[Table | str, ...]


@app.command()
def plan(
    model: Model, inputs: Inputs, stages: Stages = 4, microbatches: Microbatches = None, schedule: ScheduleName = "1f1b",
    partitioner: Partitioner = "auto", cost: Cost = "auto", memory_limit: MemoryLimit = None, devices: Devices = None,
    seed: Seed = 0, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Cut MODEL and show what every stage holds, takes and sends."""
    request = _Request(model, inputs, stages, microbatches, schedule, partitioner, cost, memory_limit, devices, seed)
    _conclude(as_json, lambda: _planned(_compiled(request), out))


@app.command()
def simulate(
    model: Model, inputs: Inputs, stages: Stages = 4, microbatches: Microbatches = None, schedule: ScheduleName = "1f1b",
    partitioner: Partitioner = "auto", cost: Cost = "auto", memory_limit: MemoryLimit = None, devices: Devices = None,
    seed: Seed = 0, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Predict the makespan, the bubble and every device's memory; draw the schedule."""
    request = _Request(model, inputs, stages, microbatches, schedule, partitioner, cost, memory_limit, devices, seed)
    _conclude(as_json, lambda: _simulated(_compiled(request), out))
