"""The choice of micro-batches: the splits to compare, and fewer micro-batches where one recording cannot serve all sizes.

7 samples in 4 micro-batches    2 2 2 1     the model branches at 2 samples:  4 3     a BatchNorm of single values:  3 2 2
"""

from __future__ import annotations

from collections.abc import Callable

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch, fewer_microbatches, sizes, split_sizes
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.options import Options
from pipecompile.planning.microbatch_counts import counts_to_try, first_count
from pipecompile.tracing.fakes.batch_symbol import Guard

__all__ = ["candidate_batches", "first_batch", "of_two_samples", "on_one_side"]


def candidate_batches(inputs: FlatInputs, options: Options) -> tuple[MiniBatch, ...]:
    """Return the splits to compare for `n_microbatches="auto"`, else the one split.

    Lists with an entry per sample would need a recording per number: they keep the default number.
    """
    if options.n_microbatches != "auto" or inputs.samples is None or inputs.lists:
        return (MiniBatch(inputs, split_sizes(inputs, options.default_microbatches)),)
    counts = counts_to_try(inputs.samples, len(options.devices))
    return tuple(MiniBatch(inputs, sizes(inputs.samples, count)) for count in counts)


def first_batch(candidates: tuple[MiniBatch, ...], options: Options) -> MiniBatch:
    """Return the split whose first micro-batch is recorded, for all `candidates`."""
    inputs = candidates[0].whole
    if len(candidates) == 1 or inputs.samples is None:
        return candidates[0]
    return MiniBatch(inputs, sizes(inputs.samples, first_count(inputs.samples, options.default_microbatches)))


def of_two_samples(batch: MiniBatch, options: Options) -> MiniBatch:
    """Return the samples of a batch in micro-batches of at least two, as many as there can be; the batch itself if that is so.

    A Schedule has a fixed number of micro-batches, and a batch of one sample cannot be helped.
    """
    samples = sum(batch.sizes)
    if (
        min(batch.sizes) > 1
        or samples == 1
        or isinstance(options.schedule, Schedule)
        or batch.whole.lists
        or batch.is_listed
    ):
        return batch
    return MiniBatch(batch.whole, sizes(samples, samples // 2))


def on_one_side(
    batch: MiniBatch,
    guard: Guard,
    options: Options,
    warnings: WarningsOnce,
    find: Callable[[tuple[int, ...]], Specialization | None],
) -> tuple[Specialization | None, MiniBatch]:
    """Return fewer micro-batches, which all are on one side of the model's branch, and the specialization that serves them.

    Without such a specialization, return micro-batches of one size. Raises InputError if the schedule has a fixed number.
    """
    wanted = batch.sizes
    _check_schedule_is_named(guard, wanted, options)
    served = ((find(parts), parts) for parts in fewer_microbatches(wanted))
    even = (parts for parts in fewer_microbatches(wanted) if len(set(parts)) == 1)
    specialization, parts = next(((one, parts) for one, parts in served if one), (None, next(even)))
    warnings.uneven(guard, wanted, parts)
    return specialization, MiniBatch(batch.whole, parts)


def _check_schedule_is_named(guard: Guard, wanted: tuple[int, ...], options: Options) -> None:
    if isinstance(options.schedule, Schedule):
        both = " and ".join(map(str, sorted(set(wanted))))
        raise InputError(
            f"the model branches on the batch size: {guard}",
            where=f"{guard.place}, and micro-batches of {both} samples",
            why=f"the schedule is for {len(wanted)} micro-batches, and these are on both sides of the branch",
            hint=f"a multiple of {len(wanted)} samples, or name a schedule: it is built for any number",
        )
