"""Collectives that ranks have launched and that are not over, such as the reduction of gradients between copies of a pipeline.

    group dp    rank 0: all_reduce 7 launched    rank 2: 6 is its last        rank 2 has not launched number 7

Calls of one group are the same collective if they have the same number in it. Groups of one name and of other ranks are others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pipecompile.distributed.hangs.flight_dump import FlightCall, FlightDump

__all__ = ["OpenCollective", "pending_collectives"]


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective by its name and its number in its group: ranks that have launched it, and those that have not.

    `names` are the kinds that ranks have launched under this number: more than one is a mistake of the program.
    """

    group: str
    sequence: int
    names: tuple[str, ...]
    launched: tuple[int, ...]
    missing: tuple[int, ...]
    line: str

    @property
    def name(self) -> str:
        return " and ".join(self.names)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.launched))
        missing = f", ranks {', '.join(map(str, self.missing))} have not" if self.missing else ""
        where = f" ({self.line})" if self.line else ""
        return f"ranks {ranks} have launched {self.name} number {self.sequence} of group {self.group}{where}{missing}: it is not over"


_Group = tuple[str, str, tuple[int, ...]]


def pending_collectives(dumps: Mapping[int, FlightDump]) -> tuple[OpenCollective, ...]:
    """Return, per group, the first collective that is not over on a rank."""
    groups = defaultdict[_Group, dict[int, dict[int, FlightCall]]](dict)
    for rank, dump in dumps.items():
        for call in dump.calls:
            if not call.is_message:
                key = call.group, call.description, dump.members.get(call.group, ())
                groups[key].setdefault(rank, {})[call.sequence] = call
    found = (_first(key, groups[key], dumps) for key in sorted(groups))
    return tuple(each for each in found if each is not None)


def _first(
    key: _Group, calls: Mapping[int, Mapping[int, FlightCall]], dumps: Mapping[int, FlightDump]
) -> OpenCollective | None:
    name, description, members = key
    pending = [number for own in calls.values() for number, call in own.items() if not call.is_over]
    if not pending:
        return None
    number = min(pending)
    same = {rank: own[number] for rank, own in sorted(calls.items()) if number in own}
    later = {rank for rank, own in calls.items() if own and min(own) > number}  # the ring has lost it
    known = set(members or calls) & dumps.keys()
    missing = tuple(sorted(known - same.keys() - later))
    line = next((call.line for call in same.values() if call.line), "")
    names = tuple(sorted({call.name for call in same.values()}))
    return OpenCollective(description or name or "0", number, names, tuple(same), missing, line)
