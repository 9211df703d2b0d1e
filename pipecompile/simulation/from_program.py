"""The tasks of a program: one per compute instruction, and a message per SEND to another device.

RECV waits for nothing by itself: what reads the value does. FREE and the slots only matter for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipecompile.ir import HOST, Instruction, Op, Program, Tie, Value, part_of
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph

__all__ = ["Message", "tasks_and_messages", "tasks_of_program"]

Message = tuple[Value | str, int, int]
"""What goes from one device to another: a value, or the "REDUCE name" of a tie."""


def tasks_of_program(program: Program, costs: Costs) -> TaskGraph:
    """For a legal program. Linear."""
    return tasks_and_messages(program, costs)[0]


def tasks_and_messages(program: Program, costs: Costs) -> tuple[TaskGraph, list[Message]]:
    """The messages by their numbers, too."""
    maker = _Maker(program, costs, _sizes(program, costs))
    for device, row in enumerate(program.rows):
        maker.row(device, row)
    messages = list(maker.messages)
    maker.tasks.label = lambda number: str(messages[number][0])
    return maker.tasks, messages


def _sizes(program: Program, costs: Costs) -> dict[str, float]:
    """Bytes by the name of a value."""
    sizes = {route.value: route.nbytes for route in program.routes}
    for stage in range(program.n_stages):
        sizes |= {f"@{stage}": costs.saved[stage], f"@{stage}.w": costs.weight_saved[stage]}
        sizes[f"@{stage}.r"] = costs.recipe[stage]
    return sizes


@dataclass(slots=True)
class _Maker:
    program: Program
    costs: Costs
    sizes: Mapping[str, float]
    tasks: TaskGraph = field(default_factory=TaskGraph)
    messages: dict[Message, int] = field(default_factory=dict)

    def row(self, device: int, row: tuple[Instruction, ...]) -> None:
        tasks, line = self.tasks, _Line(device)
        first = len(tasks.seconds)
        tasks.first_sends.append(())
        for instruction in row:
            match instruction.op:
                case Op.COMPUTE:
                    self._compute(line, instruction)
                case Op.SEND:
                    self._send(line, instruction)
                case Op.RECV:
                    self._receive(line, instruction)
                case Op.FREE:
                    self._free(line, instruction.reads[0].value)
                case Op.BROADCAST | Op.REDUCE:
                    self._exchange(line, instruction)
        tasks.rows.append(range(first, len(tasks.seconds)))
        tasks.changes.append(line.changes)

    def _compute(self, line: _Line, instruction: Instruction) -> None:
        action = instruction.action
        assert action is not None
        needs = [line.awaited.pop(o.value) for o in instruction.reads if o.value in line.awaited]
        task = self._task(line, tuple(needs), self.costs.seconds[action.kind][action.stage])
        self.tasks.actions[task] = action
        for operand in instruction.writes:
            anchor = Anchor.TASK_START if part_of(operand.value) is None else Anchor.TASK_END
            line.change(self.sizes[operand.value.name], (anchor, task))

    def _send(self, line: _Line, instruction: Instruction) -> None:
        value, peer = instruction.reads[0].value, instruction.peer
        assert peer is not None
        if peer == HOST:
            return
        if value in line.awaited:
            self._task(line, (line.awaited.pop(value),), 0.0)
        message = self._message((value, line.device, peer), value.name, self.sizes[value.name])
        self._leave(line, message)
        if self.tasks.delays[message]:
            line.leaving.setdefault(value, []).append((Anchor.MESSAGE_END, message))

    def _receive(self, line: _Line, instruction: Instruction) -> None:
        value, peer = instruction.writes[0].value, instruction.peer
        assert peer is not None
        size = self.sizes[value.name]
        if peer == HOST:
            line.change(size, *line.now)
            return
        message = line.awaited[value] = self._message((value, peer, line.device), value.name, size)
        line.change(size, (Anchor.MESSAGE_START, message))

    def _free(self, line: _Line, value: Value) -> None:
        unread = [(Anchor.MESSAGE_END, line.awaited.pop(value))] if value in line.awaited else []
        line.change(-self.sizes[value.name], *line.now, *line.leaving.pop(value, ()), *unread)

    def _exchange(self, line: _Line, instruction: Instruction) -> None:
        """BROADCAST: the home sends to each copy, which waits for it. REDUCE: the other way round."""
        tie = next(tie for tie in self.program.ties if tie.name == instruction.tie)
        home, *copies = tie.devices(self.program.placement)
        is_home = line.device == home
        others = copies if is_home else [home]
        if is_home == (instruction.op is Op.BROADCAST):
            for other in others:
                self._leave(line, self._tied(instruction, tie, line.device, other))
        else:
            self._task(line, tuple(self._tied(instruction, tie, other, line.device) for other in others), 0.0)

    def _tied(self, instruction: Instruction, tie: Tie, source: int, target: int) -> int:
        return self._message((str(instruction), source, target), tie.name, tie.nbytes)

    def _message(self, key: Message, name: str, nbytes: float) -> int:
        message = self.messages.setdefault(key, len(self.messages))
        if message == len(self.tasks.links):
            _, source, target = key
            self.tasks.links.append((source, target))
            self.tasks.delays.append(self.costs.message(name, nbytes, source, target))
        return message

    def _task(self, line: _Line, needs: tuple[int, ...], seconds: float) -> int:
        tasks = self.tasks
        task = len(tasks.seconds)
        tasks.actions.append(None)
        tasks.seconds.append(seconds)
        tasks.needs.append(needs)
        tasks.sends.append(())
        line.now = ((Anchor.TASK_END, task),)
        return task

    def _leave(self, line: _Line, message: int) -> None:
        if line.now:
            self.tasks.sends[line.now[0][1]] += (message,)
        else:
            self.tasks.first_sends[line.device] += (message,)


@dataclass(slots=True)
class _Line:
    """Where the walk over a row is: `now` is the end of the task before, `awaited` what was received and not read yet,
    `leaving` the transfers of a value out of here.
    """

    device: int
    now: tuple[tuple[Anchor, int], ...] = ()
    awaited: dict[Value, int] = field(default_factory=dict)
    leaving: dict[Value, list[tuple[Anchor, int]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def change(self, size: float, *moments: tuple[Anchor, int]) -> None:
        if size:
            self.changes.append((moments, size))
