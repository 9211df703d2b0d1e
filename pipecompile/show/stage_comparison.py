"""Predicted and measured seconds of every stage in one step, and the parts of their difference.

    step = compute + waiting        of any one device: so the difference of two steps is that of the two parts, exactly

A stage without measured actions (of another rank) has a dash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Kind
from pipecompile.ir.timeline import COMPUTE, Timeline
from pipecompile.text.units import SECONDS, fit, written

__all__ = ["comparison_columns", "comparison_remarks", "signed_share"]

_GROUPS = {
    "forward": (Kind.FORWARD,),
    "recomputation": (Kind.RECOMPUTE,),
    "backward": (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD),
}
_OUTLIER, _FEWEST, _MOST_OUTLIERS = 2.0, 3, 3
"""Ratio to the median from which an action is named, the fewest actions that have a median, the most that are named."""

_MANY_TIMES = 10.0
"""Ratio from which on a difference is written as a multiple."""

_Seconds = dict[tuple[int, Kind], list[tuple[str, float]]]


def comparison_columns(predicted: Timeline, measured: Timeline) -> dict[str, tuple[list[str], str]]:
    """Return header -> a cell per stage and the total. Seconds are those of all micro-batches of a step."""
    ours, run = _seconds(predicted), _seconds(measured)
    stages = sorted({stage for stage, _ in ours})
    columns = {"stage": ([str(stage) for stage in stages], "")}
    groups = {name: kinds for name, kinds in _GROUPS.items() if any(kind in kinds for _, kind in [*ours, *run])}
    for name, kinds in (groups | {"all": tuple(Kind)}).items():
        pairs = [(_total(ours, stage, kinds) or 0.0, _total(run, stage, kinds)) for stage in stages]
        columns |= _three_columns(name, pairs)
    return columns


def comparison_remarks(
    predicted: Timeline, measured: Timeline, *, dispatch: str = "", devices: Sequence[str] = ()
) -> list[str]:
    """Return lines on the parts of the difference of the two steps, and on actions that stand out."""
    lines = [*_parts(predicted, measured), *_outliers(measured)]
    is_shared = len(devices) > 1 and all(name.startswith("cpu") for name in devices)
    if is_shared and dispatch == "inline":
        lines.append("One thread computes for all devices (dispatch='inline'): a device waits while others compute.")
    elif is_shared and dispatch == "threads":
        lines.append("The devices share the cores of the CPU: the seconds of an action contain its wait for a core.")
    return lines


def signed_share(predicted: float, measured: float) -> str:
    """Return the difference relative to the prediction, with its sign, or how many times it is from 10 on; a dash without a prediction."""
    if not predicted:
        return "-"
    ratio = measured / predicted
    return f"{ratio - 1:+.1%}" if ratio < _MANY_TIMES else f"{ratio:,.0f} \u00d7"


def _seconds(timeline: Timeline) -> _Seconds:
    """Return the names and seconds of the actions of each stage and kind, in the order of their start."""
    seconds: _Seconds = {}
    for device in range(timeline.n_devices):
        for span in timeline.compute(device):
            try:
                action = Action.parse(span.name)
            except ScheduleError:
                continue
            seconds.setdefault((action.stage, action.kind), []).append((span.name, span.end - span.start))
    return seconds


def _total(seconds: _Seconds, stage: int, kinds: Sequence[Kind]) -> float | None:
    """Return the seconds of a stage in actions of these kinds; None if it has none."""
    rows = [each for kind in kinds for _, each in seconds.get((stage, kind), [])]
    return sum(rows) if rows else None


def _three_columns(name: str, pairs: Sequence[tuple[float, float | None]]) -> dict[str, tuple[list[str], str]]:
    """Return predicted, measured and relative difference. The total of a partly measured column is over what is measured."""
    known = [x for pair in pairs for x in pair if x is not None]
    unit, most, longest = fit(SECONDS, known), max(ours for ours, _ in pairs), max(known, default=0.0)
    both = [(ours, run) for ours, run in pairs if run is not None]
    before, after = sum(ours for ours, _ in both), sum(run for _, run in both)
    predicted = [unit.format(ours, most) for ours, _ in pairs], unit.format(before, most)
    cells = ["-" if run is None else unit.format(run, longest) for _, run in pairs]
    measured = cells, unit.format(after, longest) if both else "-"
    differences = ["-" if run is None else signed_share(ours, run) for ours, run in pairs]
    return {
        f"{name}\npredicted, {unit.name}": predicted,
        f"{name}\nmeasured, {unit.name}": measured,
        f"{name}\ndifference": (differences, signed_share(before, after) if both else "-"),
    }


def _parts(predicted: Timeline, measured: Timeline) -> Iterator[str]:
    """Yield how much of the difference of the steps is compute and how much is waiting, on the device that computes longest."""
    more = measured.makespan - predicted.makespan
    busy = [(_busy(measured, device), device) for device in range(measured.n_devices)]
    if not any(seconds for seconds, _ in busy):
        return
    seconds, device = max(busy)
    compute = seconds - _busy(predicted, device)
    share = signed_share(predicted.makespan, measured.makespan)
    yield (
        f"The step took {_longer(more)} than predicted ({share}). Device {device}, which computed longest, "
        f"computed {_longer(compute)} and waited {_longer(more - compute)}."
    )


def _busy(timeline: Timeline, device: int) -> float:
    return sum(span.end - span.start for span in timeline.spans if span.device == device and span.track == COMPUTE)


def _longer(seconds: float) -> str:
    if not seconds:
        return "no longer"
    return f"{written(SECONDS, abs(seconds))} {'longer' if seconds > 0 else 'less'}"


def _outliers(measured: Timeline) -> Iterator[str]:
    """Yield the actions that took far longer than the same of other micro-batches, the longest first."""
    ratios = []
    for rows in _seconds(measured).values():
        usual = median(seconds for _, seconds in rows)
        if len(rows) >= _FEWEST and usual > 0:
            name, longest = max(rows, key=lambda row: row[1])
            ratios.append((longest - usual, longest / usual, name))
    far = sorted((row for row in ratios if row[1] >= _OUTLIER), reverse=True)
    for excess, ratio, name in far[:_MOST_OUTLIERS]:
        yield f"{name} took {ratio:.1f} times the median of its kind in its stage: {written(SECONDS, excess)} more."
