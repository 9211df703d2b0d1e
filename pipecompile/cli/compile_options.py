"""The options of the commands that compile, and their conversion to keywords of `pipecompile.compile`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipecompile.cli.number_texts import bandwidths, numbers, sizes
from pipecompile.cli.out_folder import file_of
from pipecompile.errors import InputError

if TYPE_CHECKING:
    import torch

    from pipecompile.ir import Schedule

__all__ = ["Checkpoint", "CompileOptions", "checkpoint_of", "schedule_of", "with_classes"]

_ORDER, _CUT, _MACHINE = "Schedule", "Cut", "Costs and machine"
_STAGES = 4
_AS_TYPED = (
    "partitioner",
    "cost",
    "optimizer",
    "time_limit",
    "gap",
    "tied",
    "restored",
    "offload",
    "dispatch",
    "gradient_sums",
    "batch_norm",
    "across_batch",
    "progress",
)
"""Options whose value is that of the keyword of the same name."""

Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="MODE", rich_help_panel=_ORDER,
        help="forwards that run again before their backward: never, always, except_last (micro-batch), auto (where the memory limit demands), or a flag per stage: 1,1,0,0",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of the commands that compile, as typed."""

    stages: Annotated[
        int | None,
        typer.Option(help=f"number of stages; default: that of the plan, of the schedule's file or of --balance, else {_STAGES}"),
    ] = None  # fmt: skip
    microbatches: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="number of micro-batches; auto: the fastest number; default: twice the number of devices"
        ),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ORDER,
            help="gpipe, 1f1b, ...; auto: the fastest of these and of a search; or a file: mine.csv, program.txt",
        ),
    ] = "1f1b"
    checkpoint: Checkpoint = "never"
    restored: Annotated[
        int,
        typer.Option(
            rich_help_panel=_ORDER, help="micro-batches that a waiting device may run again ahead of their gradients"
        ),
    ] = 1
    offload: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_ORDER, help="hold on the host what forwards saved, for as few as the memory limit demands"
        ),
    ] = False
    gradient_sums: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ORDER,
            help="gradients of a value from several stages of a device: eager (added up in eager's order) or device (one sum sent)",
        ),
    ] = "eager"
    dispatch: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ORDER, help="threads that run the devices: inline (one), threads (one per device) or auto"
        ),
    ] = "auto"
    batch_norm: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            rich_help_panel=_ORDER,
            help="running statistics: deferred, once a step; each, the default, once a micro-batch",
        ),
    ] = None
    across_batch: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            rich_help_panel=_ORDER,
            help="where samples of a batch meet: each, the default, those of a micro-batch; exact, all of the mini-batch (with gpipe)",
        ),
    ] = None
    compile_stages: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND", rich_help_panel=_ORDER, help="run stages through torch.compile: inductor, aot_eager ..."
        ),
    ] = None
    cuda_graphs: Annotated[
        bool, typer.Option(rich_help_panel=_ORDER, help="capture each stage on GPUs as CUDA graphs")
    ] = False
    cuda_graphs_step: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs-step",
            rich_help_panel=_ORDER,
            help="capture the whole step as one CUDA graph, where all stages are on one GPU",
        ),
    ] = False
    progress: Annotated[bool, typer.Option(rich_help_panel=_ORDER, help="show what takes long, on a terminal")] = True
    partitioner: Annotated[str, typer.Option(rich_help_panel=_CUT, help="auto, dp or ilp")] = "auto"
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", rich_help_panel=_CUT, help="limit of the solver")
    ] = 30.0  # fmt: skip
    gap: Annotated[
        float, typer.Option(metavar="FRACTION", rich_help_panel=_CUT, help="distance from the bound at which the solver stops")
    ] = 0.001  # fmt: skip
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=file_of, rich_help_panel=_CUT,
                     help="plan.json of an earlier --out: nothing is measured or solved; --checkpoint auto recomputes as it says"),
    ] = None  # fmt: skip
    split_before: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", rich_help_panel=_CUT, help="modules that begin a stage"),
    ] = None
    keep_together: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", rich_help_panel=_CUT,
                     help="modules that share a stage; a class: each of its modules is in one stage. Repeat per group"),
    ] = None  # fmt: skip
    pin: Annotated[
        list[str] | None, typer.Option(metavar="NAME=STAGE,...", rich_help_panel=_CUT, help="stages of modules: fc=3")
    ] = None
    balance: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", rich_help_panel=_CUT, help="number of the model's children in each stage"),
    ] = None  # fmt: skip
    tied: Annotated[
        str,
        typer.Option(rich_help_panel=_CUT,
                     help="uses of a tied weight: together in a stage, apart where they balance best, or auto"),
    ] = "auto"  # fmt: skip
    cost: Annotated[str, typer.Option(rich_help_panel=_MACHINE, help="auto, analytic or profile")] = "auto"
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", rich_help_panel=_MACHINE,
                     help="memory of every device, such as 16GiB or 500MB, or of each: 16GiB,8GiB"),
    ] = None  # fmt: skip
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_MACHINE,
                     help="adam, sgd, momentum, ...: its state counts as memory, and run trains with it; default: sgd"),
    ] = None  # fmt: skip
    devices: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", rich_help_panel=_MACHINE,
                     help="one per pipeline device, repeats allowed: cuda:0,cuda:1; default: the GPUs, else CPU"),
    ] = None  # fmt: skip
    speeds: Annotated[
        str | None,
        typer.Option(metavar="X,X,...", rich_help_panel=_MACHINE, help="speeds of the devices, relative to the first: 1,1,0.5,0.5"),
    ] = None  # fmt: skip
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", rich_help_panel=_MACHINE,
                     help="bytes per second between devices, such as 16GB, or a .csv file with a row per device"),
    ] = None  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the keywords of `pipecompile.compile`. Raise InputError, PlanError or ScheduleError for an option that cannot be
        read.
        """
        from pipecompile.ir.plan import Plan

        self._check_empty()
        schedule, plan = schedule_of(self.schedule), Plan.load(self.plan) if self.plan else None
        balance = None if self.balance is None else numbers("--balance", self.balance, int)
        known = (plan and plan.n_stages, getattr(schedule, "n_stages", None), balance and len(balance))
        values = {
            "n_stages": next((n for n in known if n), _STAGES) if self.stages is None else self.stages,
            "n_microbatches": _count(self.microbatches),
            "schedule": schedule,
            "devices": self.devices.split(",") if self.devices else None,
            "memory_limit": None if self.memory_limit is None else sizes("--memory-limit", self.memory_limit),
            "speeds": None if self.speeds is None else numbers("--speeds", self.speeds, float),
            "bandwidth": None if self.bandwidth is None else bandwidths("--bandwidth", self.bandwidth),
            "split_before": _listed(self.split_before),
            "keep_together": [names if len(names) > 1 else names[0] for names in map(_names, self.keep_together or ())],
            "pin": _pins(self.pin),
            "balance": balance,
            "plan": plan,
            "checkpoint": checkpoint_of(self.checkpoint),
            "compile_stages": self.compile_stages or False,
            "cuda_graphs": "step" if self.cuda_graphs_step else self.cuda_graphs,
        }
        return values | {name: getattr(self, name) for name in _AS_TYPED}

    def _check_empty(self) -> None:
        """Raise InputError for an option with an empty text, which would be the default, or the present folder."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value == "" or (isinstance(value, list) and "" in value):
                option = f"--{field.name.replace('_', '-')}"
                why = "a variable of the shell may be unset"
                raise InputError(f"{option} '' is empty", why=why, hint=f"no {option}, for its default")


def schedule_of(text: str) -> str | Schedule:
    """Return a name, the schedule in a .csv file, or the program in a .txt file. Raise ScheduleError."""
    if text.endswith(".txt"):
        from pipecompile.ir.written_program import WrittenProgram

        return WrittenProgram.load(text)
    if not text.endswith(".csv"):
        return text
    from pipecompile.ir import Schedule

    return Schedule.load(text)


def checkpoint_of(text: str) -> str | tuple[bool, ...]:
    """Return a mode, or the flags of `1,1,0,0`, one per stage."""
    flags = text.split(",")
    return tuple(flag == "1" for flag in flags) if set(flags) <= {"0", "1"} else text


def with_classes(model: torch.nn.Module, entries: Iterable[str | list[str]]) -> list[str | list[str] | type]:
    """Return `keep_together` with names of classes replaced by the classes of the model. A module of the same name takes precedence."""
    modules = dict(model.named_modules())
    selected: list[str | list[str] | type] = []
    for entry in entries:
        kinds = dict.fromkeys(
            type(module) for name, module in modules.items() if name and type(module).__name__ == entry
        )
        selected += [entry] if not kinds or (isinstance(entry, str) and entry in modules) else kinds
    return selected


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _listed(texts: Sequence[str] | None) -> list[str]:
    return [name for text in texts or () for name in _names(text)]


def _count(text: str | None) -> int | str | None:
    """Return a number, or "auto". Raise InputError."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise InputError(
            f"--microbatches {text!r} is not a whole number", hint="--microbatches 8, or --microbatches auto"
        )
    return int(text)


def _pins(texts: Sequence[str] | None) -> dict[str, int]:
    pins: dict[str, int] = {}
    for text in _listed(texts):
        name, _, stage = text.rpartition("=")
        if not name or not stage.isdecimal():
            raise InputError(f"--pin {text!r} is not a module and its stage", hint="--pin fc=3")
        if pins.setdefault(name, int(stage)) != int(stage):
            raise InputError(
                f"--pin puts {name!r} into stage {pins[name]} and into stage {stage}", hint=f"--pin {name}={stage}"
            )
    return pins
