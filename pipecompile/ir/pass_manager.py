"""The one pass manager: a frozen pipeline of named passes, and the one hook that runs between them.

    subject ──▶ pass ──▶ hook ──▶ pass ──▶ hook ──▶ result
                         verify, time, dump

A pass maps a frozen subject to a new one and does nothing else; what is wanted between passes is asked of the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from time import perf_counter
from typing import Any

__all__ = ["Hook", "Pass", "PassManager", "Step", "watch"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A named step. `verify` raises when what `run` returned is not legal at the level that this pass reaches."""

    name: str
    run: Callable[[Any], Any]
    verify: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Step:
    """What the hook sees: the pass that just ran, what it was given, what it made, and the seconds it took."""

    done: Pass
    before: Any
    after: Any
    seconds: float


Hook = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class PassManager:
    """Runs its passes in order and calls the hook after each."""

    passes: tuple[Pass, ...]

    def run(self, subject: Any, hook: Hook) -> Any:
        """What the last pass makes of `subject`."""
        for each in self.passes:
            start = perf_counter()
            after = each.run(subject)
            hook(Step(each, subject, after, perf_counter() - start))
            subject = after
        return subject


def watch(dump: Callable[[str], object] | None = None) -> Hook:
    """The hook: verifies every step, and hands its text to `dump`, when given, before it verifies."""

    def hook(step: Step) -> None:
        if dump is not None:
            dump(_text(step))
        step.done.verify(step.after)

    return hook


def _text(step: Step) -> str:
    """The pass, its time and what it changed; the text in full where a pass changes the level."""
    title = f"== {step.done.name}: {step.seconds * 1e3:.3f} ms"
    before, after = str(step.before), str(step.after)
    if type(step.before) is not type(step.after):
        return f"{title}\n-- before\n{before}-- after\n{after}"
    diff = unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
    return "\n".join([title, *diff]) + "\n"
