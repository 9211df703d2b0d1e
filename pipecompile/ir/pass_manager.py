"""The pass manager: a frozen pipeline of named passes, and one hook that runs after each pass.

    subject ──▶ pass ──▶ hook ──▶ pass ──▶ hook ──▶ result
                         verify, time, dump

A pass maps a frozen subject to a new one and does nothing else. Verifying, timing and dumping belong to the hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import pairwise, zip_longest
from time import perf_counter
from typing import Any

__all__ = ["Hook", "Pass", "PassManager", "Step", "watch"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A named pass. `verify` raises if the result of `run` is not legal at the level that the pass reaches. `reasons` returns, from
    the subject before and the result, lines that say why what the pass placed is where it is.
    """

    name: str
    run: Callable[[Any], Any]
    verify: Callable[[Any], None]
    reasons: Callable[[Any, Any], Iterable[str]] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One finished pass: its subject `before`, its result `after`, and the time it took in `seconds`."""

    done: Pass
    before: Any
    after: Any
    seconds: float


Hook = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class PassManager:
    """Passes to run in order, with a hook called after each."""

    passes: tuple[Pass, ...]

    def run(self, subject: Any, hook: Hook) -> Any:
        """Run all passes on `subject` and return the result of the last pass."""
        for each in self.passes:
            start = perf_counter()
            after = each.run(subject)
            hook(Step(each, subject, after, perf_counter() - start))
            subject = after
        return subject


def watch(dump: Callable[[str], object] | None = None) -> Hook:
    """Return a hook that passes the text of every step to `dump`, if given, and then verifies the step."""

    def hook(step: Step) -> None:
        if dump is not None:
            dump(_text(step))
        step.done.verify(step.after)

    return hook


def _text(step: Step) -> str:
    """Return the name and time of the pass, a diff of its subject, and its reasons; both texts in full if the pass changes the level."""
    title = f"== {step.done.name}: {step.seconds * 1e3:.3f} ms"
    before, after = str(step.before), str(step.after)
    if type(step.before) is not type(step.after):
        return f"{title}\n-- before\n{before}-- after\n{after}"
    diff = _diff(before.splitlines(), after.splitlines())
    reasons = [] if step.done.reasons is None else [*step.done.reasons(step.before, step.after)]
    return "\n".join([title, *diff, *(["-- why"] if reasons else []), *reasons]) + "\n"


def _diff(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return a unified diff; each row of a device is compared with that row alone, since difflib takes the square of the lines."""
    hunks: list[str] = []
    for (old_start, old), (new_start, new) in zip_longest(_rows(before), _rows(after), fillvalue=(0, [""][:0])):
        lines = [*unified_diff(old, new, lineterm="")][2:]
        hunks += (_shifted(line, old_start, new_start) if line.startswith("@@") else line for line in lines)
    return ["--- before", "+++ after", *hunks] if hunks else []


def _rows(lines: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield (index of its first line, lines) of the header, then of the row of each device."""
    starts = [0, *(index for index, line in enumerate(lines) if line.startswith("device ")), len(lines)]
    return ((start, lines[start:stop]) for start, stop in pairwise(starts))


def _shifted(line: str, old: int, new: int) -> str:
    """Return the header of a hunk with line numbers of the whole text."""
    sizes = re.fullmatch(r"@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@", line)
    assert sizes is not None
    return f"@@ -{int(sizes[1]) + old}{sizes[2] or ''} +{int(sizes[3]) + new}{sizes[4] or ''} @@"
