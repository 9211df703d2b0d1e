"""`pipecompile bench`: seconds of a step in the pipeline, in a plain loop over micro-batches, and as predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.table import Table

from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.training_trial import eager_step
from pipecompile.text.units import SECONDS, written
from pipecompile.torch_private.accelerators import synchronize_all

if TYPE_CHECKING:
    from pipecompile.pipeline import Pipeline

__all__ = ["bench_report", "prediction_remark"]

_WARM_UP = 2
_CLOSE = 1.5
"""A prediction within this factor of the median is printed without a remark; steps of one machine vary by about as much."""


def bench_report(
    pipe: Pipeline, twin: torch.nn.Module | None, args: Sequence[torch.Tensor], steps: int
) -> CommandReport:
    """Report the median, least and most seconds of `steps` steps, of the pipeline and of the unchanged copy `twin`, in turns."""
    assert twin is not None
    device = torch.device(pipe.devices[0])
    twin, near = twin.to(device), [arg.to(device) for arg in args]
    sides: dict[str, Callable[[], object]] = {
        "pipeline": lambda: pipe.step(*args),
        "eager loop": lambda: eager_step(twin, near, pipe.schedule.n_microbatches),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(_WARM_UP + steps):
        for name, run in sides.items():
            (twin if name == "eager loop" else pipe).zero_grad()
            elapsed = _timed(run)
            if step >= _WARM_UP:
                seconds[name].append(elapsed)
    return _report(seconds, len(args[0]), pipe.simulate().makespan, pipe.plan.cost)


def _timed(run: Callable[[], object]) -> float:
    """Return the seconds of a run, until all GPUs are done."""
    start = time.perf_counter()
    run()
    synchronize_all()
    return time.perf_counter() - start


def _report(seconds: dict[str, list[float]], samples: int, predicted: float, cost: str) -> CommandReport:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for header in ("median", "least", "most", "samples/s"):
        table.add_column(header, justify="right")
    for name, each in seconds.items():
        middle = median(each)
        table.add_row(
            name, *(written(SECONDS, one) for one in (middle, min(each), max(each))), f"{samples / middle:.4g}"
        )
    table.add_row("predicted", written(SECONDS, predicted), "", "", f"{samples / predicted:.4g}" if predicted else "")
    remark = prediction_remark(median(seconds["pipeline"]), predicted, cost)
    data = {"seconds": seconds, "samples": samples, "predicted": predicted, "remark": remark}
    return CommandReport(data, (table, *filter(None, [remark])))


def prediction_remark(measured: float, predicted: float, cost: str) -> str:
    """Return why a prediction is far from the measured seconds of a step, and what to try; an empty text if it is close."""
    if not predicted or 1 / _CLOSE <= measured / predicted <= _CLOSE:
        return ""
    is_short = measured > predicted
    ratio = measured / predicted if is_short else predicted / measured
    text = f"The prediction is {ratio:.3g} times too {'short' if is_short else 'long'}"
    if cost.startswith("analytic"):
        why = (
            "its times are peaks of a data sheet, without the start of each operation"
            if is_short
            else "its times are those of a data sheet"
        )
        return f"{text}: {why}. Try --cost profile, which measures them."
    return f"{text}: operations were measured before the steps, one at a time. Try again on an idle machine, with larger micro-batches."
