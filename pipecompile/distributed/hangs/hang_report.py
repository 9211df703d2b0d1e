"""The report on a hang: at which SEND or RECV of the program each rank is, and which rank the others wait for.

    rank 0   SEND h#1 to 1       launched
    rank 1   RECV h#1 from 0     not launched, nothing before it is missing        rank 1 is the cause
    rank 2   RECV g#0 from 1     launched

The first message of a rank that is not over is its place in the row. A program is proven to end if each send waits for its receive.
So among messages that are not over there is one that is the place of both its ranks, and none of them waits for another message
there: the rank that has not launched it, or whose GPU has not come to it, is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecompile.distributed.hangs.flight_dump import CallState, FlightCall, FlightDump
from pipecompile.distributed.hangs.pending_collectives import OpenCollective, pending_collectives
from pipecompile.distributed.hangs.recorded_messages import RankMessages, RowMessage, copies_of, counted
from pipecompile.distributed.hangs.recorded_steps import with_steps
from pipecompile.distributed.messages.direct_links import Pair
from pipecompile.errors import InputError
from pipecompile.ir import Op, Program

__all__ = ["HangReport", "RankPlace", "hang_report"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The first message of a rank that is not over: the instruction, its step from 1 (None if unknown), and the recorded call."""

    rank: int
    device: int
    pair: Pair
    sequence: int
    message: RowMessage
    step: int | None
    call: FlightCall | None
    computed: str
    last: str
    is_first: bool

    @property
    def state(self) -> str:
        """The state of the message on this rank."""
        if self.call is None:
            return "not launched"
        return "begun on the GPU" if self.call.state is CallState.STARTED else "launched"

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        size = f", {self.call.nbytes:,} bytes" if self.call is not None and self.call.nbytes else ""
        after = f"; its last message is {self.last}" if self.call is None and self.last else ""
        return f"rank {self.rank} is at {self.message.text}{step}: {self.state}{size}{after}"


@dataclass(frozen=True, slots=True)
class HangReport:
    """The places of ranks, the causing ranks with the known facts of each, and collectives that are not over.

    `unplaced` has what is certain of ranks whose messages cannot be assigned to the program.
    """

    places: tuple[RankPlace, ...]
    causes: Mapping[int, str]
    collectives: tuple[OpenCollective, ...] = ()
    unplaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [*map(str, self.places), *map(str, self.collectives), *self.unplaced]
        lines += [f"cause: rank {rank}: {what}" for rank, what in self.causes.items()]
        if not self.causes:
            lines.append("no rank is certain to be the cause")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        places = [
            {
                "rank": place.rank, "device": place.device, "instruction": place.message.text, "index": place.message.place,
                "step": place.step, "state": place.state,
            }
            for place in self.places
        ]  # fmt: skip
        collectives = [
            {"name": each.name, "group": each.group, "number": each.sequence, "launched": each.launched, "missing": each.missing}
            for each in self.collectives
        ]  # fmt: skip
        return {
            "places": places, "causes": [{"rank": rank, "what": what} for rank, what in self.causes.items()],
            "collectives": collectives, "unplaced": self.unplaced, "notes": self.notes,
        }  # fmt: skip


def hang_report(program: Program, dumps: Mapping[int, FlightDump], ranks: Sequence[int] | None = None) -> HangReport:
    """Return where ranks hang. `ranks` are those of the pipeline by device; by default, those that its links join.

    Raise InputError if the dumps have no messages of a pipeline with as many devices as the program.
    """
    copies = _copies(program, dumps, ranks)
    places: list[RankPlace] = []
    causes: dict[int, str] = {}
    unplaced: list[str] = []
    for copy in copies:
        own = {device: counted(dumps[rank], program, copy) for device, rank in enumerate(copy) if rank in dumps}
        messages = with_steps(own)
        if messages is None or _is_cut(own):
            unplaced += _certain(own, copy, _RING if _is_cut(own) else _PLACES)
        else:
            found = [place for place in (_place(program, device, messages, copy) for device in messages) if place]
            places += found
            causes |= _causes(found, dumps, copy)
    collectives = pending_collectives(dumps)
    return HangReport(
        tuple(places),
        _with_collectives(causes, places, collectives, dumps),
        collectives,
        tuple(unplaced),
        _notes(places),
    )


def _copies(program: Program, dumps: Mapping[int, FlightDump], ranks: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Return the ranks of each copy of the pipeline by device. Raise InputError if there are none."""
    copies = [tuple(ranks)] if ranks else copies_of(dumps, program.n_devices)
    if any(len(set(copy)) != program.n_devices for copy in copies):
        raise InputError(f"ranks={list(ranks or ())} are not the {program.n_devices} ranks of the program's devices")
    if not copies:
        raise InputError(
            f"the dumps have no links between {program.n_devices} ranks, as the program has devices",
            why="the links of GPUs alone are recorded: gloo records no messages, and a ring that is too small has lost them",
            hint="TORCH_FR_BUFFER_SIZE=20000, and the dumps of all ranks",
        )
    return copies


_RING = (
    "the ring of the recorder is too small: messages that are not over may be lost; a ring of several steps is needed, "
    "TORCH_FR_BUFFER_SIZE=20000"
)
_PLACES = (
    "the order of the last messages fits several places of the program, or none: runs of other programs are among them"
)


def _is_cut(copy: Mapping[int, RankMessages]) -> bool:
    """Return whether the dumps of a copy may have lost messages that are not over."""
    links = {pair for own in copy.values() for pair in own.calls}
    lost = any(message.pair not in links for own in copy.values() for message in own.row)
    return lost or any(own.is_cut for own in copy.values())


def _place(program: Program, device: int, copy: Mapping[int, RankMessages], ranks: Sequence[int]) -> RankPlace | None:
    """Return the place of a device in its row; None if it has no messages."""
    own = copy[device]
    undone: list[tuple[int, Pair, int]] = []
    for pair in own.first:
        other = copy.get(pair[1 - pair.index(device)])
        number = own.undone(pair)
        if number is None and other is not None and pair in other.first:
            number = other.undone(pair)  # the ring has lost the link on this rank
        if number is not None:
            number = max(number, own.first[pair]) if own.is_counted else number
            undone.append((own.position(pair, number), pair, number))
    if not undone:
        return None
    position, pair, number = min(undone)
    step, index = divmod(position, len(own.row))
    calls = own.calls.get(pair, {})
    return RankPlace(
        ranks[device], device, pair, number, own.row[index], step + 1 if own.is_counted else None, calls.get(number),
        _computed(program, device, own.row, index), _last(own), index == 0,
    )  # fmt: skip


def _last(own: RankMessages) -> str:
    """Return the text of the last message that a rank has launched."""
    order = [(pair, number) for pair, number in own.order if number >= own.first.get(pair, number)]
    return own.row[own.position(*order[-1]) % len(own.row)].text if order else ""


def _computed(program: Program, device: int, row: Sequence[RowMessage], index: int) -> str:
    """Return the actions of a row between a message and the one before it."""
    begin = row[index - 1].place if index else -1
    between = program.rows[device][begin + 1 : row[index].place]
    actions = [str(instruction.action) for instruction in between if instruction.op is Op.COMPUTE]
    return " ".join(actions)


def _causes(places: Sequence[RankPlace], dumps: Mapping[int, FlightDump], copy: Sequence[int]) -> dict[int, str]:
    """Return the causing ranks, with the known facts of each."""
    by_device = {place.device: place for place in places}
    causes: dict[int, str] = {}
    for place in places:
        other_device = place.pair[1 - place.pair.index(place.device)]
        other = by_device.get(other_device)
        if copy[other_device] not in dumps:
            causes[copy[other_device]] = "it has left no dump: it has ended, or its dump was not passed"
        elif other is not None and (other.pair, other.sequence) == (place.pair, place.sequence):
            sender, receiver = (place, other) if place.message.is_send else (other, place)
            causes |= _of_meeting(sender, receiver, any(dumps[rank].has_starts for rank in (place.rank, other.rank)))
    return causes


def _of_meeting(sender: RankPlace, receiver: RankPlace, has_starts: bool) -> dict[int, str]:
    """Return the cause of a message that both of its ranks are at."""
    for one in (sender, receiver):
        if one.call is None:
            before = f": it has not come past {one.computed}" if one.computed else ""
            start = ", or the code before the step" if one.is_first else ""
            return {one.rank: f"it has not launched {one.message.text}, and waits for no message{before}{start}"}
    for one in (sender, receiver):
        if has_starts and one.call is not None and one.call.state is CallState.SCHEDULED:
            before = f": it has not ended {one.computed}" if one.computed else ""
            return {one.rank: f"its GPU has not come to {one.message.text}, and waits for no message{before}"}
    what = f"it and rank {{}} have both launched {sender.message.text}"
    why = (
        ", which has begun on both: the network between them, or NCCL"
        if has_starts
        else "; which of them has not come to it was not recorded (TORCH_NCCL_ENABLE_TIMING=1)"
    )
    return {sender.rank: what.format(receiver.rank) + why, receiver.rank: what.format(sender.rank) + why}


def _with_collectives(
    causes: Mapping[int, str],
    places: Sequence[RankPlace],
    collectives: Sequence[OpenCollective],
    dumps: Mapping[int, FlightDump],
) -> dict[int, str]:
    """Return the causes, those whose last call is a collective that is not over replaced by the ranks that have not launched it.

    A rank that has not launched a collective, and waits for a message, is not a cause: the missing message has its own cause.
    """
    waiting = {place.rank for place in places if place.call is not None}
    found = {rank: what for rank, what in causes.items() if rank in waiting or not _ends_in_collective(dumps.get(rank))}
    for each in collectives:
        what = f"{each.name} number {each.sequence} of group {each.group}"
        for rank in each.missing:
            if rank not in waiting:
                found.setdefault(rank, f"it has not launched {what}")
        if not each.missing and not found:
            kinds = "the ranks launched different collectives" if len(each.names) > 1 else "all ranks have launched it"
            found |= dict.fromkeys(each.launched, f"{what}: {kinds}")
    return dict(sorted(found.items()))


def _ends_in_collective(dump: FlightDump | None) -> bool:
    """Return whether the last call of a rank is a collective that is not over."""
    last = None if dump is None or not dump.calls else dump.calls[-1]
    return last is not None and not last.is_message and not last.is_over


def _certain(copy: Mapping[int, RankMessages], ranks: Sequence[int], reason: str) -> list[str]:
    """Return what is certain of ranks whose messages have no sure place in the program: the first recorded one that is not over."""
    lines = []
    for device, own in copy.items():
        calls = sorted(
            (call.order, pair, call) for pair, of in own.calls.items() for call in of.values() if not call.is_over
        )
        if not calls:
            lines.append(f"rank {ranks[device]} has no message that is not over")
            continue
        _, (sender, receiver), call = calls[0]
        where = f", {call.line}" if call.line else ""
        lines.append(
            f"rank {ranks[device]} is at message {call.sequence} of the link from rank {ranks[sender]} to rank {ranks[receiver]}, "
            f"{call.nbytes:,} bytes{where}"
        )
    return [*lines, reason]


def _notes(places: Sequence[RankPlace]) -> tuple[str, ...]:
    if places and all(place.step is None for place in places):
        return ("steps are not numbered: other messages, such as those of an evaluation, went over the links before",)
    return ()
