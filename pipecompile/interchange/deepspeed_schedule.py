"""DeepSpeed's schedules by name, with the sends and receives that its engine runs, which block.

TrainSchedule        1F1B; even stages take a forward in even steps, odd stages in odd ones
InferenceSchedule    only forwards; even stages send before they receive, odd stages receive before they send
DataParallelSchedule a single stage, a backward after each forward
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.errors import ScheduleError
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder
from pipecompile.text.input_checks import known_names
from pipecompile.text.shown_value import shown

__all__ = ["DEEPSPEED_SCHEDULES", "deepspeed_order"]

DEEPSPEED_SCHEDULES = ("TrainSchedule", "InferenceSchedule", "DataParallelSchedule")

_MOST_CELLS = 50_000_000
"""Ranks times micro-batches, as of our schedules."""


def deepspeed_order(name: str, n_ranks: int | None = None, n_microbatches: int | None = None) -> PipelineOrder:
    """Return the order of a schedule of DeepSpeed on `n_ranks` stages, one per rank. Raise InputError for an unknown name.

    By default there are 4 ranks, and twice as many micro-batches as ranks.
    """
    known_names("DeepSpeed schedule", [name], DEEPSPEED_SCHEDULES)
    ranks = (1 if name == "DataParallelSchedule" else 4) if n_ranks is None else n_ranks
    count = 2 * ranks if n_microbatches is None else n_microbatches
    if ranks * count > _MOST_CELLS:
        why = f"{shown(ranks)} ranks and {shown(count)} micro-batches are asked for"
        raise ScheduleError(
            f"a schedule has at most {_MOST_CELLS:,} cells", why=why, hint="n_ranks=4, n_microbatches=8"
        )
    if name == "DataParallelSchedule" and ranks != 1:
        raise ScheduleError("DataParallelSchedule has one stage", hint="ranks=1, or TrainSchedule")
    write = {"TrainSchedule": _train, "InferenceSchedule": _infer, "DataParallelSchedule": _alone}[name]
    rows = tuple(tuple(write(stage, ranks, count)) for stage in range(ranks))
    return PipelineOrder(rows, f"deepspeed:{name};ranks={ranks};microbatches={count}", "DeepSpeed")


def _train(stage: int, n_stages: int, n_microbatches: int) -> Iterator[OrderCell]:
    """Yield a row of TrainSchedule: in each step an exchange, then a computation. What a step computed is sent in the next."""
    previous = -1
    for step in range(2 * (n_microbatches + n_stages - 1)):
        is_forward = step % 2 == stage % 2
        current = (step - stage) // 2 if is_forward else (step + stage + 1) // 2 - n_stages
        counts, sends = 0 <= current < n_microbatches, 0 <= previous < n_microbatches
        if is_forward and stage > 0:
            if counts:
                yield OrderCell(stage, "RECV_F", current)
            if sends:
                yield OrderCell(stage, "SEND_B", previous)
        elif not is_forward and stage < n_stages - 1:
            if sends:
                yield OrderCell(stage, "SEND_F", previous)
            if counts:
                yield OrderCell(stage, "RECV_B", current)
        if counts:
            yield OrderCell(stage, "F" if is_forward else "B", current)
        previous = current


def _infer(stage: int, n_stages: int, n_microbatches: int) -> Iterator[OrderCell]:
    for step in range(n_microbatches + n_stages - 1):
        current = step - stage
        exchange = []
        if stage < n_stages - 1 and 0 <= current - 1 < n_microbatches:
            exchange.append(OrderCell(stage, "SEND_F", current - 1))
        if stage > 0 and 0 <= current < n_microbatches:
            exchange.append(OrderCell(stage, "RECV_F", current))
        yield from exchange if stage % 2 == 0 else reversed(exchange)
        if 0 <= current < n_microbatches:
            yield OrderCell(stage, "F", current)


def _alone(stage: int, _: int, n_microbatches: int) -> Iterator[OrderCell]:
    for microbatch in range(n_microbatches):
        yield OrderCell(stage, "F", microbatch)
        yield OrderCell(stage, "B", microbatch)
