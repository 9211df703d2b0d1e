"""A picture of a small schedule with the actions marked that faults name.

device 0 │ 0F0  0F1  0B0  0B1
device 1 │ 1B0* 1F0* 1F1  1B1         * = a fault names the action
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipecompile.ir import Action

__all__ = ["marked"]

_ACTION = re.compile(r"\b[0-9]+(?:(?:[FBIWR]|OFFLOAD|RELOAD)[0-9]+(?:\.[0-9]+)?|UNSHARD|RESHARD|REDUCE_GRAD)\b")
_MOST_CELLS, _MOST_DEVICES = 24, 16
"""Limits of a readable picture: cells of a row, and devices. Each fault of order has an excerpt of its own."""


def marked(rows: Sequence[Sequence[Action]], faults: Sequence[str]) -> str:
    """Return the picture; empty if no fault names an action, or if the schedule is too large."""
    longest = max(map(len, rows), default=0)
    named = {name for fault in faults for name in _ACTION.findall(fault)}
    if not named or longest > _MOST_CELLS or len(rows) > _MOST_DEVICES:
        return ""
    cells = [[f"{action}{'*' if str(action) in named else ' '}" for action in row] for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    margin = len(str(len(rows) - 1))
    return "\n".join(
        f"device {device:<{margin}} │ {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for device, row in enumerate(cells)
    )
