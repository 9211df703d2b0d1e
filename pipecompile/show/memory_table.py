"""The table of memory: a row per device, a column per kind of bytes, their sum, and the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipecompile.text.units import BYTES, fit, written

__all__ = ["MemoryFigures", "memory_columns", "memory_remarks"]

_LESS = {
    "activations": "checkpoint='auto', or micro-batches of fewer samples, hold less of them",
    "optimizer": "an optimizer with less state, or more devices, hold less of it",
}
_WORDS = {"optimizer": "state of the optimizer"}


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes of each device by kind, and the bytes that the devices have; () without a limit."""

    kinds: Mapping[str, Sequence[float]]
    limits: Sequence[float] = ()


def memory_columns(
    devices: Sequence[str], kinds: Mapping[str, Sequence[float]], limits: Sequence[float] = ()
) -> dict[str, tuple[list[str], str]]:
    """Return header -> a cell per device and the total. `kinds` and `limits` are bytes per device."""
    sums = _sums(kinds)
    unit, largest = fit(BYTES, sums), max(sums, default=0.0)
    columns = {"device": ([f"{d} · {name}" for d, name in enumerate(devices)], "")}
    for name, row in {**kinds, "all": sums}.items():
        columns[f"{name}\n{unit.name}"] = [unit.format(size, largest) for size in row], unit.format(sum(row), largest)
    if limits:
        most = fit(BYTES, limits)
        columns[f"limit\n{most.name}"] = [most.format(size, max(limits)) for size in limits], ""
        columns["of the limit"] = [f"{own / most:.0%}" for own, most in zip(sums, limits, strict=True)], ""
    return columns


def memory_remarks(kinds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return lines on the device that holds most, the kind of memory that it holds most of, and memory that is not counted."""
    sums = _sums(kinds)
    lines = []
    if any(sums):
        device = max(range(len(sums)), key=sums.__getitem__)
        kind = max(kinds, key=lambda name: kinds[name][device])
        hint = _LESS.get(kind, "more devices hold less of them each")
        share = kinds[kind][device] / sums[device]
        lines.append(
            f"Device {device} holds most, {written(BYTES, sums[device])}, of which {share:.0%} {_WORDS.get(kind, kind)}: {hint}."
        )
    if any(kinds.get("gradients", ())) and not any(kinds.get("optimizer", ())):
        lines.append("No state of an optimizer is counted: compile(optimizer='adamw') counts that of AdamW.")
    return lines


def _sums(kinds: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the bytes of each device over all kinds."""
    return [sum(row) for row in zip(*kinds.values(), strict=True)]
