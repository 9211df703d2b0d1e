"""The error of a search in which no schedule fits the memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pipecompile.errors import ScheduleError
from pipecompile.ir import HOST, Schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.text.units import BYTES, counted, written

__all__ = ["memory_error"]


def memory_error(evaluator: Evaluator, smallest: Sequence[Schedule], *, hint_recompute: bool) -> ScheduleError:
    """Return the error with the memory of the `smallest` schedules: one micro-batch after another, with each choice of recomputed stages."""
    assert evaluator.limit is not None
    most = evaluator.limit.capacity
    peaks = min((evaluator.peaks(candidate) for candidate in smallest), key=max)
    device = max(range(len(peaks)), key=lambda d: peaks[d] - most[d])
    stages, devices = counted(len(evaluator.placement), "stage"), counted(len(peaks), "device")
    in_bytes, ahead = evaluator.limit.in_bytes, _ahead(evaluator, device)
    return ScheduleError(
        f"no schedule of {stages} on {devices} fits the memory",
        why=f"one micro-batch after another needs {_amount(peaks[device], in_bytes=in_bytes)} on device {device}, "
        f"the limit is {_amount(most[device], in_bytes=in_bytes)}" + ahead,
        hint=_hint(max(peaks), in_bytes=in_bytes, is_ahead=bool(ahead), hint_recompute=hint_recompute),
    )


def _hint(peak: float, *, in_bytes: bool, is_ahead: bool, hint_recompute: bool) -> str:
    """Return what to try. Values that arrive ahead are of all micro-batches: neither smaller ones nor recomputation make them fewer."""
    if not in_bytes:
        return f"in_flight={peak:g}"
    if is_ahead:
        return f"memory_limit={ceil(peak)}, or fewer micro-batches of the same size"
    return (
        f"memory_limit={ceil(peak)}, more devices, or smaller micro-batches" + ", or checkpoint='auto'" * hint_recompute
    )


def _ahead(evaluator: Evaluator, device: int) -> str:
    """Return that values without gradients arrive ahead of their use on the device, if so: no order of the rows holds them back."""
    assert evaluator.limit is not None
    place = evaluator.placement
    ahead = [
        route.value
        for route in evaluator.routes
        if evaluator.limit.in_bytes and not route.gradient and route.nbytes and route.source != HOST
        if place[route.source] != device and device in {place[stage] for stage in route.consumers if stage != HOST}
    ]
    return (
        f"; {', '.join(ahead[:3])} may arrive there for all micro-batches at once, as no gradient goes back"
        if ahead
        else ""
    )


def _amount(size: float, *, in_bytes: bool) -> str:
    if not in_bytes:
        return f"{counted(size, 'micro-batch')} in flight"
    return f"{size:.6g} bytes" + (f" ({written(BYTES, size)})" if size >= 1024 else "")
