"""The report of `pipe.explain()`: the recordings that a pipeline keeps, and how many calls each served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from pipecompile.show.table import render
from pipecompile.text.shown_value import shown
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["Recording", "Recordings"]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording: the calls that it serves, and its cost.

    `inputs` are shapes with "B" for the batch. `guards` are conditions on the samples of a micro-batch under which the recording
    is right, each with the user's line. `kept` are the parts of the model that are opaque calls. `seconds` is the time to record,
    `calls` the number of mini-batches that ran. `changes` names what the recording before had read and what changed since, each
    with the line that reads it; `risks` what this recording read and whose changes are not noticed.
    `read` are the numbers of the model that every run reads anew, because they change between steps.
    `checked` is the time of the comparison with the model, or why there was none.
    """

    inputs: tuple[str, ...]
    mode: str
    autocast: str
    guards: tuple[str, ...]
    kept: tuple[str, ...]
    nodes: int
    seconds: float
    calls: int
    changes: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    checked: str = ""
    read: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        graph: TracedGraph,
        modes: Sequence[bool],
        seconds: float,
        calls: int,
        changes: Sequence[str] = (),
        risks: Sequence[str] = (),
    ) -> Recording:
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        names = zip(graph.facts.names, placeholders, strict=True)
        kinds = {True: "train", False: "eval"}
        return cls(
            inputs=tuple(f"{name}: {_value(value_of(node))}" for name, node in names),
            mode=kinds[modes[0]] if len(set(modes)) == 1 else f"{kinds[modes[0]]}, mixed",
            autocast=" ".join(f"{kind} {dtype}" for kind, dtype, *_ in graph.facts.outside.autocast if dtype) or "off",
            guards=tuple(_guard(guard) for guard in graph.facts.guards),
            kept=tuple(reason.piece.text for reason in graph.facts.kept),
            nodes=len(graph.graph.nodes),
            seconds=seconds,
            calls=calls,
            changes=tuple(changes),
            risks=tuple(risks),
        )

    @property
    def because(self) -> str:
        """A line per change that made this recording necessary, per number that is read anew, and per change not noticed."""
        read = (f"{label} is read at every run" for label in self.read)
        return "\n".join((*self.changes, *read, *(f"not noticed: {risk}" for risk in self.risks)))


@dataclass(frozen=True, slots=True)
class Recordings:
    """The recordings in the cache, the last used first.

    `hits` counts calls that the cache served, `traces` counts all recordings, `evictions` counts recordings dropped because the
    cache held `limit` of them.
    """

    kept: tuple[Recording, ...]
    limit: int
    hits: int
    traces: int
    evictions: int

    def __str__(self) -> str:
        table = Table(
            title=f"{len(self.kept)} of at most {self.limit} recordings, last used first",
            caption=f"hits {self.hits} · traces {self.traces} · evictions {self.evictions}",
            title_justify="left", caption_justify="left", title_style="bold", caption_style="",
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        )  # fmt: skip
        why = ["recorded because"] if any(one.because for one in self.kept) else []
        reasons = ("right while", "kept whole", *why)
        for header in ("inputs", "mode", "autocast", *reasons, "nodes", "seconds", "calls", "checked"):
            table.add_column(
                header, justify="right" if header in ("nodes", "seconds", "calls") else "left", overflow="fold"
            )
        for one in self.kept:
            reason = [one.because] if why else []
            table.add_row("\n".join(one.inputs), one.mode, one.autocast, "\n".join(one.guards) or "always", "\n".join(one.kept), *reason,
                          str(one.nodes), f"{one.seconds:.2f}", str(one.calls), one.checked)  # fmt: skip
        return render(table, width=120)


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return shown(value)
    sizes = ["B" if isinstance(size, torch.SymInt) else str(size) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}({', '.join(sizes)})" + ", requires grad" * value.requires_grad


def _guard(guard: Any) -> str:
    return f"{guard} ({line_of(guard.place)})" if guard.place else str(guard)
