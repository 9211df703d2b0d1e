"""The state that copies of a pipeline read in a step, beside their weights: attributes of the model, globals, code.

copy 0, rank 1   model.scale 1.0   Net.forward a4f1   digest ─┐
                                                              ├─► in the row that the copies exchange before a step; a warning on all
copy 1, rank 3   model.scale 3.0   Net.forward a4f1   digest ─┘   of them that names model.scale

Copies may record by themselves, so other recordings read other things: what both read is compared; of calls with one signature, what
one reads alone, too. It counts if the graphs differ, or if the value is read at every run; of a loss, if it has changed. What a forward
writes is of the samples of a copy, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from pipecompile.distributed.agreement.collective_call import hash_of
from pipecompile.distributed.agreement.graph_identity import graph_identity
from pipecompile.distributed.agreement.state_texts import attributes, fixed_keys, live_keys, text_of
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.failures.failure_report import ranks_of_texts
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import RecordingWarning
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.tracing.guards.read_state import ReadState, line_of_read
from pipecompile.tracing.guards.state_guards import StateGuards
from pipecompile.tracing.user_source import line_of, warn

__all__ = ["StateOfCopies"]

_EXCHANGES = 8
"""Differences that are looked at in each step; later ones are in steps 16, 32, 64 ..."""

_SHOWN = 3
"""Values that a message shows."""

_OF_LOSS = "loss_fn: "
"""Begin of the labels of what a loss function reads."""

_OF_FUNCTION = ("defaults of", "keyword defaults of")
"""Begins of the labels of what comes with the code of a function."""

_BITS = 48
"""Bits of a digest, which float64 has exactly."""


class _KnownState(NamedTuple):
    """State that a recording reads, the keys of what it contains, and the tensors that are neither parameters nor buffers."""

    state: ReadState
    keys: dict[str, str]
    tensors: tuple[tuple[str, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class _ReadRow:
    """The reads of one copy: a key per label of what its recording contains (`fixed`), of what is read at every run (`live`), and of what its
    losses read (`loss`), with the labels of these that have `changed`. The rest is told where rows differ.
    """

    fixed: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    loss: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    graph: str = ""
    signature: str = ""
    written: list[str] = field(default_factory=list)


class StateOfCopies:
    """The comparison of one rank, step after step. Each label is told once. `entries` returns the recordings, the one in use last;
    `buffers` the buffers of the model, which are compared as its weights are.
    """

    def __init__(self) -> None:
        self.entries: Callable[[], Sequence[Specialization]] = tuple
        self.buffers: Callable[[], Iterable[torch.Tensor]] = tuple
        self._steps, self._exchanges, self._seen = 0, 0, 0
        self._fixed: dict[tuple[str, int], _KnownState] = {}
        self._first_of_loss: dict[str, str] = {}
        self._written, self._told = set[str](), set[str]()
        self._discussed = set[tuple[float, ...]]()
        self._stamp: tuple[int, ...] = ()
        self._number = 0

    def follow(self, model: nn.Module, entries: Callable[[], Sequence[Specialization]]) -> None:
        """Compare the recordings of this model from now on."""
        self.entries, self.buffers = entries, model.buffers

    def digest(self) -> float:
        """Return a number for what this copy reads in the present step; 0 if nothing is compared."""
        self._steps += 1
        self.written()
        is_due = self._steps & (self._steps - 1) == 0
        if not self.entries() or (self._exchanges >= _EXCHANGES and not is_due):
            return 0.0
        stamp = (
            *(id(self._known(place).state) for place in range(len(self._guards()))),
            len(self._told),
            len(self._written),
        )
        if stamp != self._stamp:  # most of a row is the same in every step
            row = self._row()
            self._stamp, self._number = (
                stamp,
                hash_of(f"{sorted(row.fixed.items())} {sorted(row.loss.items())} {sorted(row.changed)}"),
            )
        return float(hash_of(f"{self._number} {sorted(self._live().items())}") % 2**_BITS)

    def compare(self, group: CollectiveGroup, digests: Sequence[float]) -> None:
        """Warn, on the same rank of all copies, if they read other values. All copies call this together with all digests."""
        if 0.0 in digests or len({*digests}) == 1 or tuple(digests) in self._discussed:
            return
        self._discussed.add(tuple(digests))
        self._exchanges += 1
        latest = self.entries()[-1]
        row = asdict(self._row()) | {"graph": graph_identity(latest.graph, with_numbers=True)}
        row |= {"signature": str(latest.signature), "written": sorted(self._written)}
        if labels := _differing([_ReadRow(**json.loads(text)) for text in group.all_gather_text(json.dumps(row))]):
            self._told |= {*labels}
            texts = group.all_gather_text("; ".join(self._shown(label) for label in labels[:_SHOWN]))
            warn(_text(labels, ranks_of_texts(group.ranks, texts)), RecordingWarning)

    def _row(self) -> _ReadRow:
        """Return what the recording in use and its losses read."""
        row = _ReadRow(live=self._live())
        for place, (prefix, _) in enumerate(self._guards()):
            (row.loss if prefix else row.fixed).update(self._compared(prefix, self._known(place).keys))
        first = self._first_of_loss
        row.changed.extend(label for label, key in row.loss.items() if first.setdefault(label, key) != key)
        return row

    def _live(self) -> dict[str, str]:
        """Return a key per label of what is read at every run."""
        live = dict[str, str]()
        for place, (prefix, guards) in enumerate(self._guards()):
            numbers = {label: holder.get() for label, holder in guards.lifted.holders.items()}
            live |= self._compared(prefix, live_keys(self._known(place).tensors, numbers))
        return live

    def _known(self, place: int) -> _KnownState:
        prefix, guards = self._guards()[place]
        known = self._fixed.get((prefix, place))
        if known is None or known.state is not guards.state:
            keys, tensors = fixed_keys(guards.state), attributes(guards.state, self.buffers())
            known = self._fixed[prefix, place] = _KnownState(guards.state, keys, tensors)
        return known

    def _compared(self, prefix: str, keys: Mapping[str, str]) -> dict[str, str]:
        named = {f"{prefix}{label}": key for label, key in keys.items() if _name_of(label) not in self._written}
        return {label: key for label, key in named.items() if label not in self._told}

    def _guards(self) -> list[tuple[str, StateGuards]]:
        """Return the guards of the recording in use and of its losses, each with the begin of its labels."""
        latest = self.entries()[-1]
        losses = [(_OF_LOSS, one.guards) for one in latest.losses.values()]
        return [(prefix, one) for prefix, one in [("", latest.guards), *losses] if one is not None]

    def _shown(self, label: str) -> str:
        for prefix, guards in self._guards():
            name = label.removeprefix(prefix)
            state, holder = guards.state, guards.lifted.holders.get(name)
            value: Any = state.values.get(name, "other numbers") if holder is None else holder.get()
            if label.startswith(prefix) and (holder or name in state.places):
                place = line_of_read(state.places.get(name, ""))
                return f"{label} = {text_of(value)}" + (f", read at {line_of(place)}" if place else "")
        return f"{label} is not read"

    def written(self) -> set[str]:
        """Return the names of what recordings write, also if such a recording is gone now."""
        for entry in self.entries():
            if entry.number > self._seen:
                places = (place for stage in entry.stages for place in SideEffects.of(stage).places)
                self._written |= {str(place.key) for place in places}
        self._seen = max((entry.number for entry in self.entries()), default=self._seen)
        return self._written


def _differing(rows: Sequence[_ReadRow]) -> list[str]:
    """Return the labels of what these copies compute with, and have other values of."""
    changed, written = {one for row in rows for one in row.changed}, {one for row in rows for one in row.written}
    found = _unlike([row.live for row in rows])
    found += [label for label in _unlike([row.loss for row in rows]) if label in changed]
    if len({row.graph for row in rows}) > 1:
        found += _unlike([row.fixed for row in rows]) or _of_some(rows)
    return [label for label in found if _name_of(label) not in written]


def _of_some(rows: Sequence[_ReadRow]) -> list[str]:
    """Return the labels that some of these copies alone have, in calls of one signature."""
    if len({row.signature for row in rows}) > 1:
        return []
    every = dict.fromkeys(label for row in rows for label in row.fixed)
    missing = [label for label in every if not all(label in row.fixed for row in rows)]
    return sorted(missing, key=lambda label: label.startswith(_OF_FUNCTION))


def _unlike(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the labels that all rows have, with other keys."""
    return [label for label in rows[0] if all(label in row for row in rows) and len({row[label] for row in rows}) > 1]


def _name_of(label: str) -> str:
    """Return the name of an attribute, the last one of its label."""
    return label.rpartition(".")[2]


def _text(labels: Sequence[str], ranks: str) -> str:
    more = f"; and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return (
        f"the copies of the pipeline compute with other values beside their weights: {ranks}{more}. Their gradients are added up as those "
        "of one model. Try the same attributes, code and arguments of the model on every rank, not under `if rank == 0`"
    )
