"""Task graph of a program: a task per compute instruction, and a message per SEND to another device.

RECV does not wait: the instruction that reads the value waits. FREE and slots only affect memory, but for the FREE of what an OFFLOAD
copies: where other actions stand between the two, the copy runs beside them, and the device waits for its end at the FREE.

With rendezvous, both ends wait: the receiver says that it is ready, in a message of no seconds, and the transfer begins when the sender
has also come to its SEND.

    SEND   wait for "ready" │ send │ wait for the value          RECV   send "ready" │ wait for the value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipecompile.ir import HOST, Action, Instruction, Kind, Op, Program, Tie, Value, part_of
from pipecompile.ir.directions import all_placements
from pipecompile.ir.slices import in_slices, unit_text
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.input_copies import InputReads
from pipecompile.simulation.overlapped_tasks import overlap_tasks
from pipecompile.simulation.sharding_tasks import add_sharding
from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph

__all__ = ["Message", "tasks_and_messages", "tasks_of_program"]

Message = tuple[Value | str, int, int]
"""(value, or instruction such as "REDUCE name" of a tie; source device; target device)."""


def tasks_of_program(program: Program, costs: Costs, *, rendezvous: bool = False) -> TaskGraph:
    """Return the tasks of a legal program. With `rendezvous`, a device waits in each SEND and RECV until the transfer is over. Linear."""
    return tasks_and_messages(program, costs, rendezvous=rendezvous)[0]


def tasks_and_messages(program: Program, costs: Costs, *, rendezvous: bool = False) -> tuple[TaskGraph, list[Message]]:
    """Return the tasks of a legal program, and its messages between devices in the order of their numbers."""
    builder = _TaskBuilder(program, costs, _sizes(program, costs), rendezvous)
    for device, row in enumerate(program.rows):
        builder.row(device, row)
    messages = list(builder.messages)
    builder.tasks.label = lambda number: _label(messages[number][0], program.n_slices)
    if costs.sharding is not None:
        add_sharding(builder.tasks, costs.sharding)
    if pairs := {(in_slices(one, program.n_slices), in_slices(two, program.n_slices)) for one, two in program.overlaps}:
        overlap_tasks(builder.tasks, pairs, costs)
    return builder.tasks, messages


def _label(value: Value | str, n_slices: int) -> str:
    """Return the text of a message as that of a schedule: of a slice, with its micro-batch."""
    if isinstance(value, str) or n_slices == 1:
        return str(value)
    return f"{str(value).rpartition('#')[0]}#{unit_text(value.microbatch, n_slices)}"


def _sizes(program: Program, costs: Costs) -> dict[str, float]:
    """Return the bytes of a value by its name."""
    sizes = {route.value: route.nbytes for route in program.routes}
    for stage in range(program.n_stages):
        sizes |= {f"@{stage}": costs.saved[stage], f"@{stage}.w": costs.weight_saved[stage]}
        sizes |= {f"@{stage}.r": costs.recipe[stage], f"@{stage}.o": costs.saved[stage], f"@{stage}.h": 0.0}
        sizes[f"@{stage}.k"] = 0.0  # part of what its slice saves
    return sizes


@dataclass(slots=True)
class _TaskBuilder:
    """Appends the tasks of one row after another; a message gets its number at its SEND or RECV, whichever row comes first."""

    program: Program
    costs: Costs
    sizes: Mapping[str, float]
    rendezvous: bool = False
    tasks: TaskGraph = field(default_factory=TaskGraph)
    messages: dict[Message, int] = field(default_factory=dict)

    def row(self, device: int, row: tuple[Instruction, ...]) -> None:
        tasks, state = self.tasks, _RowState(device)
        first = len(tasks.seconds)
        tasks.first_sends.append(())
        tasks.inputs.append([])
        for instruction in row:
            match instruction.op:
                case Op.COMPUTE:
                    self._compute(state, instruction)
                case Op.SEND:
                    self._send(state, instruction)
                case Op.RECV:
                    self._receive(state, instruction)
                case Op.FREE:
                    self._free(state, instruction.reads[0].value)
                case Op.BROADCAST | Op.REDUCE:
                    self._exchange(state, instruction)
        tasks.rows.append(range(first, len(tasks.seconds)))
        tasks.changes.append(state.changes)

    def _compute(self, state: _RowState, instruction: Instruction) -> None:
        action = instruction.action
        assert action is not None
        awaited = [o.value for o in instruction.reads if o.value in state.awaited]
        needs = tuple(state.awaited.pop(value) for value in awaited)
        action = in_slices(action, self.program.n_slices)
        task = self._task(state, needs, self.costs.action_seconds(action))
        if self.costs.has_input_seconds:
            for value in awaited:
                state.inputs.note_read(value.name, task)
        self.tasks.actions[task] = action
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            self._copy(state, action, instruction.reads[0].value, instruction.writes[0].value)
            return
        begin = task - 1 if state.overlaps else task
        for operand in instruction.writes:
            anchor = (Anchor.TASK_START, begin) if part_of(operand.value) is None else (Anchor.TASK_END, task)
            state.change(self._size(operand.value), anchor)
        state.overlaps = instruction.overlaps

    def _copy(self, state: _RowState, action: Action, source: Value, target: Value) -> None:
        """Add the copy of an OFFLOAD or a RELOAD, which begins after it: RELOAD waits for the copy out, and B or I for the copy back."""
        ends = (state.device, HOST) if action.kind is Kind.OFFLOAD else (HOST, state.device)
        message = state.awaited[target] = self._message((target, *ends), self.costs.offload_seconds(action.stage))
        self._add_send(state, message)
        if action.kind is Kind.OFFLOAD:
            state.leaving.setdefault(source, []).append((Anchor.MESSAGE_END, message))
            state.stored[source] = message, state.now
        else:
            state.change(self._size(target), *state.now, (Anchor.MESSAGE_START, message))

    def _send(self, state: _RowState, instruction: Instruction) -> None:
        value, peer = instruction.reads[0].value, instruction.peer
        assert peer is not None
        if peer == HOST:
            return
        needs: tuple[int, ...] = (state.awaited.pop(value),) if value in state.awaited else ()
        if self.rendezvous:
            needs += (self._message((f"ready {value}", peer, state.device), 0.0),)
        if needs:
            self._task(state, needs, 0.0)
        message = self._message((value, state.device, peer), self._seconds(value, state.device, peer))
        self._add_send(state, message)
        if self.rendezvous:
            self._task(state, (message,), 0.0)
        if self.tasks.delays[message]:
            state.leaving.setdefault(value, []).append((Anchor.MESSAGE_END, message))

    def _receive(self, state: _RowState, instruction: Instruction) -> None:
        value, peer = instruction.writes[0].value, instruction.peer
        assert peer is not None
        size = self._size(value)
        if peer == HOST:
            state.change(size, *state.now)
            self._copy_input(state, value, size)
            return
        if self.rendezvous:
            self._task(state, (), 0.0)
            self._add_send(state, self._message((f"ready {value}", state.device, peer), 0.0))
        message = self._message((value, peer, state.device), self._seconds(value, peer, state.device))
        state.change(size, (Anchor.MESSAGE_START, message))
        if self.rendezvous:
            self._task(state, (message,), 0.0)
        else:
            state.awaited[value] = message

    def _copy_input(self, state: _RowState, value: Value, size: float) -> None:
        """Add the copy of an input from the host, which begins as soon as it has a buffer."""
        if seconds := self.costs.input_seconds(size):
            message = state.awaited[value] = self._message((value, HOST, state.device), seconds)
            state.inputs.add_copy(self.tasks, state.device, message, value.name)

    def _free(self, state: _RowState, value: Value) -> None:
        if value in state.stored:
            message, after = state.stored.pop(value)
            if after != state.now:
                self._task(state, (message,), 0.0)
        unread = [(Anchor.MESSAGE_END, state.awaited.pop(value))] if value in state.awaited else []
        state.change(-self._size(value), *state.now, *state.leaving.pop(value, ()), *unread)

    def _exchange(self, state: _RowState, instruction: Instruction) -> None:
        """Add the messages of a tie. BROADCAST: the home sends, and each copy waits. REDUCE: the copies send, and the home waits."""
        tie = next(tie for tie in self.program.ties if tie.name == instruction.tie)
        home, *copies = tie.devices(*all_placements(self.program))
        is_home = state.device == home
        peers = copies if is_home else [home]
        if is_home == (instruction.op is Op.BROADCAST):
            for peer in peers:
                self._add_send(state, self._tied(instruction, tie, state.device, peer))
        else:
            self._task(state, tuple(self._tied(instruction, tie, peer, state.device) for peer in peers), 0.0)

    def _tied(self, instruction: Instruction, tie: Tie, source: int, target: int) -> int:
        seconds = self.costs.message(tie.name, tie.nbytes, source, target)
        return self._message((str(instruction), source, target), seconds)

    def _seconds(self, value: Value, source: int, target: int) -> float:
        """Return the seconds of a message with a value."""
        return self.costs.message(value.name, self.sizes[value.name], source, target, self._share(value))

    def _share(self, value: Value) -> float:
        """Return the share of a value in that of its micro-batch: 1, or that of its slice."""
        slices = self.costs.slices
        return 1.0 if slices is None else slices.of_bytes(value.microbatch % self.program.n_slices)

    def _size(self, value: Value) -> float:
        """Return the bytes of a value."""
        return self.sizes[value.name] * self._share(value)

    def _message(self, key: Message, seconds: float) -> int:
        """Return the number of a message, which is added to the graph when it is first met."""
        message = self.messages.setdefault(key, len(self.messages))
        if message == len(self.tasks.links):
            self.tasks.links.append(key[1:])
            self.tasks.delays.append(seconds)
        return message

    def _task(self, state: _RowState, needs: tuple[int, ...], seconds: float) -> int:
        tasks = self.tasks
        task = len(tasks.seconds)
        tasks.actions.append(None)
        tasks.seconds.append(seconds)
        tasks.needs.append(needs)
        tasks.sends.append(())
        state.now = ((Anchor.TASK_END, task),)
        return task

    def _add_send(self, state: _RowState, message: int) -> None:
        if state.now:
            self.tasks.sends[state.now[0][1]] += (message,)
        else:
            self.tasks.first_sends[state.device] += (message,)


@dataclass(slots=True)
class _RowState:
    """The position in a row: `now` is the end of the previous task, `awaited` has the messages received and not yet read,
    `leaving` the ends of the sends of each value, `stored` the copies of OFFLOADs and the positions after which they begin.
    `inputs` has the copies from the host. `overlaps`: the next action overlaps with the previous one.
    """

    device: int
    overlaps: bool = False
    inputs: InputReads = field(default_factory=InputReads)
    now: tuple[tuple[Anchor, int], ...] = ()
    awaited: dict[Value, int] = field(default_factory=dict)
    leaving: dict[Value, list[tuple[Anchor, int]]] = field(default_factory=dict)
    stored: dict[Value, tuple[int, tuple[tuple[Anchor, int], ...]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def change(self, size: float, *moments: tuple[Anchor, int]) -> None:
        if size:
            self.changes.append((moments, size))
