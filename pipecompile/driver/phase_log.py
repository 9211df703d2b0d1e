"""The hook between the phases of a compilation: it verifies each result, takes its time, and keeps a line about it.

With `TORCH_TRACE=directory`, the levels are artifacts of torch's structured trace, for `tlparse`:

prepare   ─► pipecompile_graph      as graph.txt of a dump
partition ─► pipecompile_plan       as plan.json
lower     ─► pipecompile_program    as program.txt
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from pipecompile.text.progress import task
from pipecompile.torch_private.diagnostics import add_artifact

__all__ = ["PhaseLog"]

Result = TypeVar("Result")

_LOGGERS = {"cost": "partition", "partition": "partition", "lower": "schedule", "place": "run", "bind": "run"}
"""Loggers of phases, below `pipecompile`; those of all other phases go to `trace`."""


_TEXTS = {
    "cost": "costs of operations",
    "partition": "cutting the graph",
    "place": "moving parameters to their stages",
    "lower": "lowering the schedule",
}
"""Text of a phase in its line of progress; by default its name."""


_TRACE = logging.getLogger("torch.__trace")
"""The logger of torch's structured trace."""


def _is_traced() -> bool:
    """Return whether torch writes its trace into a directory: TORCH_TRACE is set."""
    return any(getattr(handler, "root_dir", None) is not None for handler in _TRACE.handlers)


@dataclass(slots=True)
class PhaseLog:
    """The seconds of every phase that has run and a line about its result, in the order of the phases.

    `str(log)` is the text of phases.txt in a dump. A phase that runs again, such as the lowering for another number of
    micro-batches, replaces its entry.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        name: str,
        function: Callable[..., Result],
        *inputs: Any,
        verify: Callable[[Result], object] | None = None,
        describe: Callable[[Result], str] = lambda _: "",
    ) -> Result:
        """Run one phase: call `function(*inputs)`, verify the result, note its seconds. Raises what either raises."""
        start = perf_counter()
        with task(_TEXTS.get(name, name)):
            result = function(*inputs)
        self.seconds[name] = perf_counter() - start
        if verify is not None:
            verify(result)
        self.lines[name] = describe(result)
        if _is_traced():
            _trace_phase(name, result)
        log = logging.getLogger(f"pipecompile.{_LOGGERS.get(name, 'trace')}")
        log.info("%s: %.3f s, %s", name, self.seconds[name], self.lines[name])
        return result

    def __str__(self) -> str:
        rows = (f"{name:<10} {seconds * 1e3:12.3f} ms   {self.lines[name]}" for name, seconds in self.seconds.items())
        return "\n".join(row.rstrip() for row in rows) + "\n"


_ARTIFACTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "prepare": ("graph", str),
    "partition": ("plan", lambda partitioned: str(partitioned.plan.to_json())),
    "lower": ("program", str),
}
"""By phase the name of its level, and the function that writes it."""


def _trace_phase(phase: str, result: Any) -> None:
    """Add the result of a phase as an artifact, if it is a level."""
    if phase in _ARTIFACTS:
        level, write = _ARTIFACTS[phase]
        add_artifact(f"pipecompile_{level}", lambda: write(result))
