"""A fake of NCCL for programs on ranks: what each rank launches, held to the rules of NCCL, in one thread and without chance.

    launch    the hosts launch their rows by the code of `RankCodeBuilder`; nothing runs yet, and no host waits
    order     a launch comes after the launch before it on its stream, after the events that its stream waits for, and after the
              launch before it on its communicator; with one queue per device, after the launch before it there
    meet      the n-th send on a communicator meets its n-th receive: there are no tags. A send waits for its receive
              (rendezvous) or does not (buffered)
    run       launches run in an order that these rules allow. Where there is none, `Deadlock` says who waits for whom

Every value is a tensor that its name and micro-batch decide, and a compute checks all that it reads. Memory that is given back, or received
into, is overwritten with NaN first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from pipecompile.distributed.data_parallel.gradient_exchange import completed
from pipecompile.distributed.messages.direct_values import DirectValues
from pipecompile.distributed.messages.message_layout import MessageLayout, PayloadKind
from pipecompile.distributed.messages.row_messages import departures
from pipecompile.distributed.rank_code import RankCodeBuilder
from pipecompile.ir import HOST, SHARDING, Instruction, Kind, Op, Program, Tie, Value
from pipecompile.runtime.registers import Frame, Run
from pipecompile.runtime.stream_events import Lane
from pipecompile.runtime.streams import StreamTask
from tests.support.emulated import Device, Handle

__all__ = [
    "BOTH_WAYS", "Communicators", "Deadlock", "FakeWorld", "Launched", "Queue", "add_collectives", "add_departures", "add_sharding",
    "add_ties",    "directed", "execute",
]  # fmt: skip

CPU = torch.device("cpu")


class Queue(Enum):
    """The launches of a device that wait for one another beside those of a stream and of a communicator."""

    STREAMS = "none"
    COMMUNICATORS = "all communicators of a device share one queue"
    DEVICE = "all launches of a device share one queue"


class Deadlock(Exception):
    """Launches that wait for one another for ever."""


def _nothing() -> None:
    """Move no data."""


@dataclass(eq=False, slots=True)
class Launched:
    """A launch of `rank` on stream `lane`, after the launches `after`; `pair` has the sender and receiver of a message.

    A launch of a collective has its group and no pair. `place` is the index of the instruction in the row.
    """

    rank: Hashable
    lane: Hashable
    what: object
    run: Callable[[], None] = _nothing
    after: list[Launched] = field(default_factory=list)
    pair: tuple[Hashable, Hashable] | None = None
    group: Hashable = None
    place: int = -1

    @property
    def is_send(self) -> bool:
        return self.pair is not None and self.pair[0] == self.rank

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}"


Communicators = Callable[[tuple[Hashable, Hashable]], Hashable]
"""Returns the communicator of the messages from one rank to another."""


def directed(pair: tuple[Hashable, Hashable]) -> Hashable:
    """One communicator per direction."""
    return pair


def BOTH_WAYS(pair: tuple[Hashable, Hashable]) -> Hashable:  # noqa: N802 a trap, put in on purpose
    """One communicator for both directions of a pair."""
    return frozenset(pair)


class FakeWorld:
    """The launches of all ranks of one program. `sizes` are the samples per micro-batch, which decide the lengths of values."""

    def __init__(self, program: Program, sizes: Sequence[int], copy: int | None = None) -> None:
        self.program, self.sizes, self.copy = program, tuple(sizes), copy
        self.wires: defaultdict[Hashable, deque[torch.Tensor]] = defaultdict(deque)
        self.rows: dict[Hashable, list[Launched]] = {}
        self.computed = 0
        for device in range(program.n_devices):
            self.rows[self.rank(device)] = self._launch(device)

    def rank(self, device: int) -> Hashable:
        return device if self.copy is None else (self.copy, device)

    def _launch(self, device: int) -> list[Launched]:
        values = _values(self, device)
        builder = CheckedCode(self, values, device)
        row = builder.row()
        frame = Frame([None] * len(builder.registers), [], self.sizes)
        for run in row:
            run(frame)
        streams = values.streams
        assert isinstance(streams, FakeStreams)
        return streams.launches

    def tensor(self, value: Value) -> torch.Tensor:
        """Return what a value is."""
        number = float(crc32(f"{value} {self.copy}".encode()))
        return torch.full((self.sizes[value.microbatch],), number, dtype=torch.float64)


# -- launching --------------------------------------------------------------------------------------------------------


class FakeStreams:
    """The streams of one rank. Launches are noted in the order in which the host makes them."""

    def __init__(self, world: FakeWorld, device: int) -> None:
        self.rank, self.device, self.row = world.rank, device, world.program.rows[device]
        self.launches: list[Launched] = []
        self.lanes: dict[Lane, FakeStream] = {}

    def apart(self, source: int, target: int) -> bool:
        return source != HOST

    def stream(self, lane: Lane) -> FakeStream:
        return self.lanes.setdefault(lane, FakeStream(self, lane))

    def release(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda tensor: None


class FakeStream:
    def __init__(self, streams: FakeStreams, lane: Lane) -> None:
        self.streams, self.lane = streams, lane
        self.waits: list[Launched] = []
        self.last: Launched | None = None

    def run(self, task: StreamTask, frame: Frame) -> None:
        given = {index: frame.registers[index] for index in task.reads}
        if task.op is Op.FREE:
            (index,) = task.reads
            frame.registers[index] = None
            self._note(task, lambda: _overwrite(given[index]))
            return
        is_receive = self.lane[0] != self.lane[1] and task.op is Op.RECV
        before = frame.registers[task.writes[0]] if is_receive else None  # what was in the receive buffer
        first = Handle()
        made = {index: first if is_receive else Handle() for index in task.writes}
        frame.registers = [made.get(index, value) for index, value in enumerate(frame.registers)]

        def late() -> None:
            _overwrite(before)
            device = Device({index: handle.value for index, handle in given.items()}, frame)
            task.run(device)  # type: ignore[arg-type]
            for index, handle in made.items():
                handle.value = device.registers[index]

        self._note(task, late)

    def _note(self, task: StreamTask, run: Callable[[], None]) -> None:
        source, target = self.lane
        streams = self.streams
        pair = None if source == target else (streams.rank(source), streams.rank(target))
        after = [*self.waits, *([] if self.last is None else [self.last])]
        what = streams.row[task.place[1]]
        rank, place = streams.rank(streams.device), task.place[1]
        self.waits, self.last = [], Launched(rank, self.lane, what, run, after, pair, place=place)
        streams.launches.append(self.last)

    def record(self, event: Any) -> Launched:
        assert self.last is not None
        return self.last

    def wait(self, event: Launched) -> None:
        self.waits.append(event)


def _overwrite(handle: Handle | None) -> None:
    if handle is not None and isinstance(handle.value, torch.Tensor):
        handle.value.fill_(float("nan"))


class CheckedCode(RankCodeBuilder):
    """The code of a rank whose computes check what they read and write what the names say."""

    def __init__(self, world: FakeWorld, values: DirectValues, device: int) -> None:
        program = world.program
        super().__init__(program, (), (CPU,) * program.n_devices, values, device, _Everything())
        self.world = world

    def compute(self, instruction: Instruction, device: int) -> Run:
        reads, writes = (
            [(self.register(operand, device), operand.value) for operand in side]
            for side in (instruction.reads, instruction.writes)
        )

        def run(frame: Frame) -> None:
            self.world.computed += 1
            for index, value in reads:
                found, expected = frame.registers[index], self.world.tensor(value)
                assert torch.equal(found, expected), f"{instruction.action} reads {found} for {value}"
            for index, value in writes:
                frame.registers[index] = self.world.tensor(value)

        return run

    def send(self, instruction: Instruction, device: int) -> Run:
        return self.compute(instruction, device) if instruction.peer == HOST else super().send(instruction, device)

    def receive(self, instruction: Instruction, device: int) -> Run:
        return self.compute(instruction, device) if instruction.peer == HOST else super().receive(instruction, device)


class _Everything(frozenset[str]):
    """All names: every layout is agreed."""

    def __contains__(self, name: object) -> bool:
        return True


class _Layouts(dict[Hashable, MessageLayout]):
    """The layout of every value: as many float64 as the micro-batch has samples."""

    def get(self, key: Any, _default: object = None) -> Any:
        length = key[1][2]
        return MessageLayout(PayloadKind.TENSOR, 8 * length, False, torch.float64, (length,), (1,))


@dataclass(frozen=True, slots=True)
class FakeLink:
    wire: deque[torch.Tensor]

    def send(self, part: torch.Tensor) -> None:
        self.wire.append(part.clone())

    def receive(self, part: torch.Tensor) -> None:
        message = self.wire.popleft()
        assert message.shape == part.shape, (
            f"a message of {len(message)} bytes into {len(part)}: NCCL overruns or hangs"
        )
        part.copy_(message)


def _values(world: FakeWorld, device: int) -> DirectValues:
    size = world.program.n_devices
    ranks = SimpleNamespace(index=device, size=size, devices=(CPU,) * size)
    communicator: Any = SimpleNamespace(ranks=ranks, breakers=[], wait=lambda *_: None)
    values = DirectValues(communicator)
    values.streams, values.layouts = FakeStreams(world, device), _Layouts()  # type: ignore[assignment]
    pairs = {(device, peer) for peer in range(size)} | {(peer, device) for peer in range(size)}
    values.links = {pair: FakeLink(world.wires[pair]) for pair in pairs}  # type: ignore[misc]
    return values


# -- beside the rows --------------------------------------------------------------------------------------------------


def add_departures(world: FakeWorld) -> None:
    """Add what `RankExecutable` sends to all ranks when its row is launched, on the compute stream."""
    ends = range(world.program.n_devices)
    for departure in departures(world.program):
        for source, target in ((departure.device, other) for other in ends if other != departure.device):
            _add_message(world, source, target, str(departure))


def add_ties(world: FakeWorld, ties: Sequence[Tie]) -> None:
    """Add the weights that `TiedCopies` sends before the rows, and the gradients and weights after them."""
    before: dict[Hashable, list[Launched]] = {rank: [] for rank in world.rows}
    for tie in ties:
        home, *others = tie.devices(world.program.placement)
        for away in others:
            for device in (home, away):
                _append(before[world.rank(device)], world, device, (home, away), f"refresh {tie.name}")
            for part in ("gradient", "written"):
                _add_message(world, away, home, f"{part} of {tie.name}")
    for rank, row in world.rows.items():
        if first := before[rank]:
            begun: set[Hashable] = set()
            for launch in row:
                if launch.lane not in begun:  # each run begins with a fork of all streams
                    launch.after.append(first[-1])
                    begun.add(launch.lane)
            row[:0] = first


def add_collectives(worlds: Sequence[FakeWorld], *, is_sharded: bool) -> None:
    """Add the reductions of data parallel copies, each after the instruction that completes a stage's gradients.

    Sharded copies gather their parameters before.
    """
    program = worlds[0].program
    for world, device in ((world, device) for world in worlds for device in range(program.n_devices)):
        row, rank = world.rows[world.rank(device)], world.rank(device)
        group = "copies", device
        for index in sorted(completed(program.rows[device], [{s} for s in range(program.n_stages)]), reverse=True):
            at = max(place for place, launch in enumerate(row) if launch.place <= index) + 1
            computed = [one for one in row[:at] if one.lane == (device, device)][-1:]
            row.insert(at, Launched(rank, "reduce", f"reduce after {index}", after=computed, group=group))
        reductions = [launch for launch in row if launch.lane == "reduce"]
        for before, launch in pairwise(reductions):
            launch.after.append(before)
        if is_sharded:
            row.insert(0, Launched(rank, (device, device), "gather", group=group))
            row[1].after.append(row[0])


def add_sharding(worlds: Sequence[FakeWorld]) -> None:
    """Add the collectives of the actions on sharded parameters, on a stream of their own: after the action, and a gathering before the
    first computation of its stage.
    """
    for world in worlds:
        for device, program_row in enumerate(world.program.rows):
            rank = world.rank(device)
            row, gathering, before = list[Launched](), dict[int, Launched](), list[Launched]()
            for launch in world.rows[rank]:
                row.append(launch)
                action = program_row[launch.place].action if launch.lane == (device, device) else None
                if action is not None and action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
                    after = [launch, *before[-1:]]
                    row.append(Launched(rank, "collectives", str(action), after=after, group=("copies", device)))
                    before.append(row[-1])
                    if action.kind is Kind.UNSHARD:
                        gathering[action.stage] = row[-1]
                elif action is not None and action.kind not in SHARDING and action.stage in gathering:
                    launch.after.append(gathering.pop(action.stage))
            world.rows[rank] = row


def _add_message(world: FakeWorld, source: int, target: int, name: str) -> None:
    for device in (source, target):
        _append(world.rows[world.rank(device)], world, device, (source, target), name)


def _append(row: list[Launched], world: FakeWorld, device: int, ends: tuple[int, int], name: str) -> None:
    before = [launch for launch in row if launch.lane == (device, device)][-1:]
    pair = world.rank(ends[0]), world.rank(ends[1])
    row.append(Launched(world.rank(device), (device, device), name, after=before, pair=pair))


# -- the rules --------------------------------------------------------------------------------------------------------


def execute(
    rows: dict[Hashable, list[Launched]],
    queue: Queue,
    *,
    is_buffered: bool,
    communicators: Communicators = directed,
    is_first_step: bool = False,
    is_synchronous: bool = False,
    seed: int | None = None,
) -> int:
    """Order the launches of all ranks under the rules. Return their number. Raises Deadlock. With a `seed`, run them, in a random order.

    In the first step the host of a receiver waits until that of the sender has announced the layout. A synchronous host waits for each
    of its launches, as one does that allocates memory of the device.
    """
    waits = _waits(rows, queue, communicators, is_buffered=is_buffered)
    if is_first_step or is_synchronous:
        _add_hosts(rows, waits, announces=is_first_step, is_synchronous=is_synchronous)
    order = _sorted(waits, seed)
    if len(order) < len(waits):
        raise Deadlock(_cycle(waits, set(order)))
    for launch in order if seed is not None else ():
        if isinstance(launch, Launched):
            launch.run()
    return len(order)


Node = Hashable
Waits = dict[Node, list[Node]]
"""Maps a launch, a meeting or a host's step to all that it waits for."""


def _waits(
    rows: dict[Hashable, list[Launched]], queue: Queue, communicators: Communicators, *, is_buffered: bool
) -> Waits:
    waits: Waits = {}
    ends: defaultdict[tuple[Hashable, Hashable], list[Launched]] = defaultdict(list)
    for rank, row in rows.items():
        last_queued: Launched | None = None
        for launch in row:
            waits[launch] = [*launch.after]
            communicator = launch.group if launch.pair is None else communicators(launch.pair)
            if communicator is not None:
                earlier = ends[communicator, rank]
                waits[launch] += earlier[-1:]
                earlier.append(launch)
            if queue is Queue.DEVICE or (queue is Queue.COMMUNICATORS and communicator is not None):
                waits[launch] += [] if last_queued is None else [last_queued]
                last_queued = launch
    _add_meetings(ends, waits, is_buffered=is_buffered)
    return waits


def _add_meetings(ends: dict[tuple[Hashable, Hashable], list[Launched]], waits: Waits, *, is_buffered: bool) -> None:
    """Let what meets wait for one another: sends and receives, and the launches of a collective on all ranks of its group."""
    by_communicator: defaultdict[Hashable, list[list[Launched]]] = defaultdict(list)
    for (communicator, _), launches in ends.items():
        by_communicator[communicator].append(launches)
    for sides in by_communicator.values():
        if is_buffered and sides[0][0].group is None:
            _add_buffered(sides, waits)
            continue
        for number in range(max(map(len, sides))):
            meeting = [side[number] for side in sides if number < len(side)]
            is_whole = len(meeting) == len(sides) and (
                meeting[0].group is not None or (len(sides) == 2 and meeting[0].pair == meeting[1].pair)
            )
            _meet(meeting, waits, is_possible=is_whole)


def _meet(meeting: list[Launched], waits: Waits, *, is_possible: bool) -> None:
    """Let launches end together: each waits for all that any of them waits for, or for itself if they cannot meet."""
    if not is_possible:
        for launch in meeting:
            waits[launch] += [other for other in meeting if other is not launch] or [launch]
        return
    begins = [("begin", launch) for launch in meeting]
    for begin, launch in zip(begins, meeting, strict=True):
        waits[begin] = waits[launch]
    for launch in meeting:
        waits[launch] = [*begins, *(other for other in meeting if other.is_send and other is not launch)]


def _add_buffered(sides: list[list[Launched]], waits: Waits) -> None:
    sent: Counter[Hashable] = Counter()
    sends: dict[tuple[Hashable, int], Launched] = {}
    for launch in (one for side in sides for one in side if one.is_send):
        sends[launch.pair, sent[launch.pair]] = launch
        sent[launch.pair] += 1
    received: Counter[Hashable] = Counter()
    for launch in (one for side in sides for one in side if not one.is_send):
        waits[launch].append(sends.get((launch.pair, received[launch.pair]), launch))
        received[launch.pair] += 1


def _add_hosts(rows: dict[Hashable, list[Launched]], waits: Waits, *, announces: bool, is_synchronous: bool) -> None:
    """Let each host launch in the order of its row. With `announces`, a receive after the host of the sender has launched the send."""
    sends: defaultdict[Hashable, list[Launched]] = defaultdict(list)
    for launch in (one for row in rows.values() for one in row if one.is_send):
        sends[launch.pair].append(launch)
    received: Counter[Hashable] = Counter()
    for row in rows.values():
        before: Node = None
        for launch in row:
            host = ("host", launch)
            waits[host] = [] if before is None else [before]
            if announces and launch.pair is not None and not launch.is_send:
                waits[host].append(("host", sends[launch.pair][received[launch.pair]]))
                received[launch.pair] += 1
            first = ("begin", launch) if ("begin", launch) in waits else launch
            waits[first] = [*waits[first], host]
            before = launch if is_synchronous else host


def _sorted(waits: Waits, seed: int | None) -> list[Node]:
    """Return what can run, in an order in which all that it waits for comes before. With a seed, some streams run as early as
    they may, and others as late.
    """
    left = {node: len(needed) for node, needed in waits.items()}
    followers: defaultdict[Node, list[Node]] = defaultdict(list)
    for node, needed in waits.items():
        for other in needed:
            followers[other].append(node)
    ready: list[Node] = [node for node, needed in waits.items() if not needed]
    return _taken(ready, left, followers) if seed is None else _paced(ready, left, followers, Random(seed))


def _taken(ready: list[Node], left: dict[Node, int], followers: dict[Node, list[Node]]) -> list[Node]:
    """Return the order in which the last that can run is next."""
    order = []
    while ready:
        order.append(node := ready.pop())
        for follower in followers[node]:
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return order


def _paced(first: list[Node], left: dict[Node, int], followers: dict[Node, list[Node]], random: Random) -> list[Node]:
    """Return an order in which each stream has a rank of its own, by which it comes first or last among those that can run."""
    number, order = count(), []
    pace: defaultdict[Node, float] = defaultdict(random.random)
    ready = [(pace[_stream(node)], next(number), node) for node in first]
    heapify(ready)
    while ready:
        order.append(node := heappop(ready)[2])
        for follower in followers[node]:
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, (pace[_stream(follower)], next(number), follower))
    return order


def _stream(node: Node) -> Node:
    launch = node if isinstance(node, Launched) else node[1]  # type: ignore[index]
    return launch.rank, launch.lane


def _cycle(waits: Waits, done: set[Node]) -> str:
    """Return who waits for whom, along one cycle."""
    node: Node = next(node for node in waits if node not in done)
    path: list[Node] = []
    while node not in path:
        path.append(node)
        node = next(other for other in waits[node] if other not in done)
    names = [_name(one) for one in [*path[path.index(node) :], node]]
    return "each waits for the next:\n  " + "\n  ".join(
        name for place, name in enumerate(names) if not place or names[place - 1] != name
    )


def _name(node: Node) -> str:
    return str(node) if isinstance(node, Launched) else str(node[1])  # type: ignore[index]
