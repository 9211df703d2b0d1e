"""The tables that the recordings of one pipeline leave on its model, and what this means for the others of its recordings.

self.cos = make(n)                   one place for all: the recordings for other signatures are made anew, with the table there
self.cache[n] = make(n)              an entry of its own: the others serve with it too
if len(self.mask) != n: make(n)      each signature replaces the table of another: it is computed in each run, and not left
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.driver.left_tables import Spot, replaced_spots, spot_of
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.state.made_tables import MadeTable
from pipecompile.tracing.user_source import line_of, warn

__all__ = ["TablesOfModel"]


class TablesOfModel:
    """The tables that recordings have left. If not `is_active`, none are left: other ranks hold the model too.

    `_skipped` are the spots of those that are not left any more. `_missing` has the shapes of those that a run has computed and that could
    not be left, by their spots; `_warned` are the spots of which a warning was given.
    """

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._skipped, self._warned = set[Spot](), set[Spot]()
        self._missing: dict[Spot, tuple[str, ...]] = {}

    def leave(self, specialization: Specialization, entries: Sequence[Specialization], samples: int) -> bool:
        """Leave the tables of a recording that is about to run on micro-batches of `samples`, where none are. Other recordings serve with
        them too, if they have none at the same spots, and read them only as entries of a container. Return whether tables are left.
        """
        tables = specialization.tables
        if not specialization.facts.tables or tables.spots or tables.is_tried:
            return False
        if self._is_active:
            before = [one for one in entries if one is not specialization and one.is_of_state()]
            if tables.leave(self._skipped):
                specialization.take_state()
            for one in before if not tables.are_attributes else ():
                if one.tables.own.isdisjoint(tables.spots):
                    one.take_state()
        else:
            tables.give_up()
        for table in tables.of_batch(samples):
            self._warn_of(table, "micro-batch", "more samples does not begin with that of fewer")
        known = tables.spots | self._skipped | self._warned
        for table in specialization.facts.tables:
            if table.shapes and (spot := spot_of(table.place)) not in known:
                self._missing.setdefault(spot, table.shapes)
        return bool(tables.spots)

    def take_off_replaced(self, new: Specialization, entries: Sequence[Specialization]) -> bool:
        """Return whether a new recording replaces tables that others have left by its own, no larger ones: then they say nothing to it,
        and are taken off the model for good. Warn of tables that eager would find on the model.
        """
        self._warn_of_missing(new)
        spots = {spot for one in entries for spot in one.tables.spots}
        replaced = replaced_spots(new.graph, spots) if spots else set[Spot]()
        self._skipped |= replaced
        for one in entries if replaced else ():
            one.tables.take_off(replaced)
        return bool(replaced)

    def warn_of_growth(self, found: Sequence[Specialization], entries: Sequence[Specialization]) -> None:
        """Warn, once per table, of a list in which a micro-batch replaces a table that later ones have read before."""
        tables = {spot_of(table.place): table for one in entries for table in one.facts.tables if table.shapes}
        for place, one in enumerate(found if tables else ()):
            if any(other is not one for other in found[place + 1 :]):
                for spot in one.tables.replaced & tables.keys():
                    self._warn_of(
                        tables[spot], "list of micro-batches", "longer inputs does not begin with that of shorter ones"
                    )

    def _warn_of_missing(self, new: Specialization) -> None:
        """Warn that a recording computes a table of its own where a run of another has computed one."""
        for table in new.facts.tables if self._missing else ():
            if self._missing.get(spot_of(table.place), table.shapes) != table.shapes:
                self._warn_of(table, "shape of inputs", "longer inputs does not begin with that of shorter ones")

    def _warn_of(self, table: MadeTable, kind: str, condition: str) -> None:
        """Warn, once, that a table is not left on the model."""
        if (spot := spot_of(table.place)) not in self._warned:
            self._warned.add(spot)
            self._missing.pop(spot, None)
            what = (
                f"{table.name}, computed at {line_of(table.source)}, is not left on the model: a pipeline computes it for each {kind},"
                f" where a call of the model reads what an earlier one has left. This differs if the table of {condition}."
                " Try to compute it before compile, as large as it is ever read"
            )
            warn(what, RecordingWarning)
