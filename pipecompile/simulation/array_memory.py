"""Peak memory of a run by arrays: what stages save, per device, as `from_schedule` counts it.

F + saved (or recipe, if recomputed)     R + saved, - recipe     B - saved     I - saved + weight_saved     W - weight_saved
at its start                             start, end              end           end                          end

OFFLOAD takes what its forward saved away and RELOAD brings it back, by copies that take no time.
The first B or W of a stage adds its gradients, at its start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import Kind
from pipecompile.simulation.array_walk import ArrayRun
from pipecompile.simulation.costs import Costs

__all__ = ["peak_bytes"]

_KINDS = list(Kind)


def peak_bytes(run: ArrayRun, placement: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """Return the most bytes that each device holds at one time: changes at the same moment add up to one."""
    begins, ends = _changes(run, costs)
    peaks = []
    for device, (first, stop) in enumerate(zip(run.starts, run.starts[1:], strict=False)):
        constant = sum(size for size, own in zip(costs.parameters, placement, strict=True) if own == device)
        row = slice(first, stop)
        peaks.append(_peak(run.end[row] - run.seconds[row], run.end[row], begins[row], ends[row], constant))
    return tuple(peaks)


def _changes(run: ArrayRun, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes that each action adds at its start, and at its end."""
    stages, kinds, microbatches = run.tasks
    n_stages = len(costs.saved)
    is_kind = {kind: kinds == number for number, kind in enumerate(_KINDS)}
    recomputed = np.zeros((n_stages, int(microbatches.max(initial=0)) + 1), dtype=bool)
    recomputed[stages[is_kind[Kind.RECOMPUTE]], microbatches[is_kind[Kind.RECOMPUTE]]] = True
    trained = np.zeros(n_stages, dtype=bool)
    trained[stages[~is_kind[Kind.FORWARD]]] = True
    saved, kept, recipe = (np.array(each)[stages] for each in (costs.saved, costs.weight_saved, costs.recipe))
    of_forward = np.where(recomputed[stages, microbatches], recipe, saved) * trained[stages]
    begins = np.where(is_kind[Kind.FORWARD], of_forward, np.where(is_kind[Kind.RECOMPUTE], saved, 0.0))
    ends = np.zeros(len(begins))
    for kind, size in (
        (Kind.RECOMPUTE, -recipe), (Kind.BACKWARD, -saved), (Kind.INPUT_GRAD, kept - saved), (Kind.WEIGHT_GRAD, -kept),
        (Kind.OFFLOAD, -saved), (Kind.RELOAD, saved),
    ):  # fmt: skip
        ends = np.where(is_kind[kind], size, ends)
    if costs.sharding is not None:
        adding = np.flatnonzero(is_kind[Kind.BACKWARD] | is_kind[Kind.WEIGHT_GRAD])
        added, first = np.unique(stages[adding], return_index=True)
        begins[adding[first]] += np.array(costs.sharding.gradients)[added]
    return begins, ends


def _peak(
    starts: NDArray[np.float64],
    stops: NDArray[np.float64],
    begins: NDArray[np.float64],
    ends: NDArray[np.float64],
    constant: float,
) -> float:
    """Return the peak of a row. Its tasks follow one another, so moments ascend but for rounding of the starts."""
    if not begins.any() and not ends.any():
        return constant
    starts = np.maximum(starts, np.concatenate([[0.0], stops[:-1]]))
    moments = np.stack([starts, stops], axis=1).ravel()
    held = constant + np.cumsum(np.stack([begins, ends], axis=1).ravel())
    is_last = np.append(moments[1:] != moments[:-1], True)
    return max(constant, float(held[is_last].max(initial=0.0)))
