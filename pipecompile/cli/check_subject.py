"""The subject of `check`: a model, or the pipeline in a file that another framework wrote.

pipecompile check torchvision:resnet18 --input 8x3x64x64
pipecompile check schedule.csv --rules pair,rank --repair mended.csv
pipecompile check 'megatron:Et*3|(tt|)*29m|L' --ranks 16
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.load_model import ModelSource, seed_number
from pipecompile.cli.out_folder import file_of
from pipecompile.errors import InputError, ScheduleError, VerifyError

if TYPE_CHECKING:
    from pipecompile.interchange import PipelineOrder

__all__ = ["PIPELINE_AT_FAULT", "CheckSubject"]

PIPELINE_AT_FAULT = 5
"""Exit code of a pipeline that has a fault or deadlocks."""

_FILES, _MODELS = "A pipeline in a file", "A model"


@dataclass(frozen=True, slots=True)
class CheckSubject:
    """The words after `check`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FILE",
            help="a model, as for plan; or a pipeline: a CSV of torch, a layout of Megatron-LM, nodes of sail-sg, deepspeed:TrainSchedule",
        ),
    ]
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE]",
            rich_help_panel=_MODELS,
            help="one per input: 32x3x224x224, 2x128:int64",
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            parser=seed_number,
            metavar="N",
            show_default="0",
            rich_help_panel=_MODELS,
            help="seed of the weights and of the random data",
        ),
    ] = 0
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="RULE,...",
            rich_help_panel=_FILES,
            help="rules of communicators: buffered, rendezvous, pair, rank, lazy; default: all",
        ),
    ] = None
    repair: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.csv", parser=file_of, rich_help_panel=_FILES, help="write an order that runs under all rules"
        ),
    ] = None
    ranks: Annotated[int | None, typer.Option(rich_help_panel=_FILES, help="number of ranks of a layout or name")] = (
        None
    )
    microbatches: Annotated[
        int | None, typer.Option(rich_help_panel=_FILES, help="number of micro-batches of a layout or name")
    ] = None

    @property
    def is_pipeline(self) -> bool:
        """Return whether the word is a file, or the name of a framework's pipeline."""
        from pipecompile.interchange.order_reader import is_named_order

        path = Path(self.model)
        is_file = self.model.endswith((".csv", ".txt")) or path.is_file() or (path.exists() and not self.inputs)
        return is_named_order(self.model) or is_file

    @property
    def source(self) -> ModelSource:
        """Return the model and its inputs. Raise InputError for options that are about a file."""
        for name in ("rules", "repair", "ranks", "microbatches"):
            if getattr(self, name) is not None:
                raise InputError(
                    f"--{name} is about a pipeline in a file, and {self.model!r} is a model",
                    hint="pipecompile check schedule.csv",
                )
        if not self.inputs:
            raise InputError("a model needs its inputs", hint="--input 32x3x224x224, once per input")
        return ModelSource(self.model, self.inputs, self.seed)

    def pipeline_report(self, evaluate: bool = False) -> CommandReport:
        """Check the pipeline, and write its repaired order on request. The exit code is 5 for a fault or a deadlock."""
        from pipecompile.interchange import check_order, read_schedule

        for option, given in (("--input", self.inputs), ("--seed", self.seed), ("--eval", evaluate)):
            if given:
                raise InputError(f"{option} is about a model, and {self.model!r} is a pipeline", hint=f"no {option}")
        if self.model.endswith(".json"):
            raise InputError(
                f"{self.model!r} is not a pipeline of another framework", hint=f"pipecompile show {self.model}"
            )
        order = read_schedule(self.model, n_ranks=self.ranks, n_microbatches=self.microbatches)
        report = check_order(order, self.rules)
        blocks, files = [str(report)], list[str]()
        if self.repair is not None:
            block, files = _repair(order, self.rules, self.repair)
            blocks.append(block)
        code = 0 if report.is_sound else PIPELINE_AT_FAULT
        return CommandReport(report.to_dict() | {"files": files}, tuple(blocks), code)


def _repair(order: PipelineOrder, rules: str | None, path: Path) -> tuple[str, list[str]]:
    """Write the repaired order. Return what to say about it, and the files that were written."""
    from pipecompile.interchange import check_order, repair_order

    try:
        repaired = repair_order(order)
    except (ScheduleError, VerifyError) as error:
        return f"cannot be repaired: {error}", []
    repaired.save(path)
    return f"repaired order:\n{check_order(repaired, rules)}\nwrote {path}", [str(path)]
