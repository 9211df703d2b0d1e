"""The messages of a program in the dumps of its ranks: which SEND or RECV of which step a recorded call is.

    link 0-1    1 byte, h#0, h#1, h#0, h#1, ...      a communicator per directed pair has the messages of steps, one after the other
    sequence    1       2    3    4    5             message `sequence - 2` since the link was opened; the dump has the last ones

If other runs went over the links as well, such as an evaluation, the count is off. Then the order of SEND and RECV on a rank
shows where in a step the rank is: the last calls of a rank are those of its row at one place, or the dump says that several fit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipecompile.distributed.hangs.flight_dump import FlightCall, FlightDump
from pipecompile.distributed.messages.direct_links import LINK_NAME, Pair
from pipecompile.distributed.messages.row_messages import departures
from pipecompile.ir import HOST, Op, Program

__all__ = ["RankMessages", "RowMessage", "copies_of", "counted", "links_of", "row_messages"]

_LINK = re.compile(re.escape(LINK_NAME).replace(r"\{\}", r"(\d{1,9})-(\d{1,9})"))
_FIRST = 2
"""Sequence number of the first value of a link: one byte opens the link."""


@dataclass(frozen=True, slots=True)
class RowMessage:
    """A message in the row of a device.

    `pair` has the devices, `place` the index in the row, `text` the instruction with the action that makes or reads its value.
    """

    pair: Pair
    place: int
    text: str
    is_send: bool


def row_messages(program: Program, device: int) -> tuple[RowMessage, ...]:
    """Return the messages of a device in a run in the order of their launch: those of its row, then the departures."""
    found = []
    for place, instruction in enumerate(program.rows[device]):
        if instruction.op in (Op.SEND, Op.RECV) and instruction.peer not in (None, HOST):
            is_send, peer = instruction.op is Op.SEND, instruction.peer or 0
            pair = (device, peer) if is_send else (peer, device)
            found.append(RowMessage(pair, place, f"{instruction}{_use(program, device, place)}", is_send))
    for departure in departures(program):
        others = [end for end in range(program.n_devices) if end != departure.device]
        for end in others if departure.device == device else [device]:
            is_send = departure.device == device
            text = f"SEND {departure} ({end})" if is_send else f"RECV {departure} from {departure.device}"
            found.append(RowMessage((departure.device, end), len(program.rows[device]), text, is_send))
    return tuple(found)


def _use(program: Program, device: int, place: int) -> str:
    """Return the action of a row that makes the value of a SEND, or first reads that of a RECV, in words."""
    row = program.rows[device]
    if row[place].op is Op.SEND:
        value = row[place].reads[0].value
        makers = (one.action for one in reversed(row[:place]) if value in (operand.value for operand in one.writes))
        action, word = next(makers, None), "result"
    else:
        value = row[place].writes[0].value
        readers = (one.action for one in row[place:] if value in (operand.value for operand in one.reads))
        action, word = next(filter(None, readers), None), "input"
    return "" if action is None else f" ({word} of {action})"


@dataclass(frozen=True, slots=True)
class RankMessages:
    """The messages of one rank as its dump has them.

    `calls` has, per link, the recorded calls by their sequence number; `first` is, per link, the number of the first message of
    step 0. `is_counted` says whether steps are counted from the opening of the links.
    """

    rank: int
    row: tuple[RowMessage, ...]
    calls: Mapping[Pair, Mapping[int, FlightCall]]
    first: Mapping[Pair, int]
    is_counted: bool = True

    def numbers(self, pair: Pair) -> list[int]:
        """Return the indices in the row of the messages of a link."""
        return [index for index, message in enumerate(self.row) if message.pair == pair]

    def position(self, pair: Pair, sequence: int) -> int:
        """Return the position of a message in all steps of the rank: step times messages of the row, plus the index in the row."""
        places = self.numbers(pair)
        step, index = divmod(sequence - self.first[pair], len(places))
        return step * len(self.row) + places[index]

    def undone(self, pair: Pair) -> int | None:
        """Return the sequence number of the first message of a link that is not over; None if the dump has nothing of the link."""
        calls = self.calls.get(pair)
        if not calls:
            return None
        return min((number for number, call in calls.items() if not call.is_over), default=max(calls) + 1)

    @property
    def is_cut(self) -> bool:
        """Whether the ring may have lost messages that are not over: the oldest one of a link is not over, or a link is not there."""
        begun = ((min(calls), calls) for calls in self.calls.values())
        return any(number >= _FIRST and not calls[number].is_over for number, calls in begun)

    @property
    def order(self) -> list[tuple[Pair, int]]:
        """The recorded messages without the opening of links, as link and sequence number, in the order of their launch."""
        named = [(call.order, pair, number) for pair, calls in self.calls.items() for number, call in calls.items()]
        return [(pair, number) for _, pair, number in sorted(named) if number >= _FIRST]

    @property
    def is_in_order(self) -> bool:
        """Whether all recorded messages follow one another as in the row."""
        positions = [self.position(pair, number) for pair, number in self.order]
        return positions == list(range(positions[0], positions[0] + len(positions))) if positions else True


def copies_of(dumps: Mapping[int, FlightDump], n_devices: int) -> list[tuple[int, ...]]:
    """Return the ranks of each copy of the pipeline, by device: ranks that links join, in ascending order; others are left out."""
    neighbours = defaultdict[int, set[int]](set)
    for dump in dumps.values():
        for sender, receiver in links_of(dump):
            neighbours[sender].add(receiver)
            neighbours[receiver].add(sender)
    copies, seen = [], set[int]()
    for rank in sorted(neighbours):
        if rank not in seen:
            together = _reached(rank, neighbours)
            seen |= together
            copies.append(tuple(sorted(together)))
    return [ranks for ranks in copies if len(ranks) == n_devices]


def _reached(start: int, neighbours: Mapping[int, set[int]]) -> set[int]:
    seen, open_ranks = {start}, [start]
    while open_ranks:
        new = neighbours[open_ranks.pop()] - seen
        seen |= new
        open_ranks += new
    return seen


def links_of(dump: FlightDump) -> dict[Pair, dict[int, FlightCall]]:
    """Return the calls of each link, by the ranks of its ends and by sequence number.

    Several pipelines of the same ranks have links of one name: those that were opened last are returned.
    """
    found: dict[Pair, dict[int, FlightCall]] = {}
    newest: dict[Pair, int] = {}
    for call in dump.calls:
        match = _LINK.fullmatch(call.group) if call.is_message else None
        if match is None:
            continue
        pair = int(match[1]), int(match[2])
        if dump.rank not in pair or call.group_id < newest.get(pair, 0):
            continue
        if call.group_id > newest.get(pair, -1):
            newest[pair], found[pair] = call.group_id, {}
        found[pair][call.sequence] = call
    return found


def counted(dump: FlightDump, program: Program, ranks: Sequence[int]) -> RankMessages:
    """Return the messages of a rank, with steps counted from the opening of the links."""
    device_of = {rank: device for device, rank in enumerate(ranks)}
    row = row_messages(program, device_of[dump.rank])
    pairs = {message.pair for message in row}
    named = {(device_of[a], device_of[b]): calls for (a, b), calls in links_of(dump).items()}
    calls = {pair: named[pair] for pair in sorted(pairs & named.keys())}
    return RankMessages(dump.rank, row, calls, dict.fromkeys(pairs, _FIRST))
