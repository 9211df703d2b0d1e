"""The pass manager: a frozen pipeline of named passes, and one hook that runs after each pass.

    subject ──▶ pass ──▶ hook ──▶ pass ──▶ hook ──▶ result
                         verify, time, dump

A pass maps a frozen subject to a new one and does nothing else. Verifying, timing and dumping belong to the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import unified_diff
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
    diff = unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
    reasons = [] if step.done.reasons is None else [*step.done.reasons(step.before, step.after)]
    return "\n".join([title, *diff, *(["-- why"] if reasons else []), *reasons]) + "\n"
