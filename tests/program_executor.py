"""Runs a program by brute force, with labels in place of tensors, and says what goes wrong first.

Buffers hold the label of what was written last. A device is stepped until it waits; when none moves, it is over. It
knows no pass and no verifier, only what each instruction means and what each action has to compute.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import product

from pipecompile.ir import HOST, Action, Instruction, Kind, Op, Operand, Program, Value, saved

Buffer = tuple[str, int | None, int | None]


class ExecutionError(Exception):
    """The program does not do what it should."""


def execute(program: Program) -> None:
    """Return when the program computes the right thing and leaves nothing behind. Raises ExecutionError."""
    try:
        _Execution(program).run()
    except (KeyError, IndexError) as error:
        raise ExecutionError(f"no such thing: {error}") from error


class _Execution:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: list[dict[Buffer, Value]] = [{} for _ in program.rows]
        self.mail: dict[tuple[Value, int, int], int] = Counter()
        self.ran: Counter[Action] = Counter()
        actions = [i.action for row in program.rows for i in row if i.action]
        self.trained = any(action.kind is not Kind.FORWARD for action in actions)
        self.split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.INPUT_GRAD}

    def run(self) -> None:
        rows = [deque(row) for row in self.program.rows]
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                while row and self.step(device, row[0]):
                    row.popleft()
                    moved = True
        if any(rows):
            raise ExecutionError("deadlock: " + ", ".join(str(row[0]) for row in rows if row))
        self.check_end()

    def step(self, device: int, instruction: Instruction) -> bool:
        match instruction.op:
            case Op.COMPUTE:
                assert instruction.action is not None
                self.compute(device, instruction, instruction.action)
            case Op.SEND:
                assert instruction.peer is not None
                value = self.read(device, instruction.reads[0])
                if instruction.peer == device:
                    raise ExecutionError("a device cannot send to itself")
                self.mail[value, device, instruction.peer] += 1
            case Op.RECV:
                assert instruction.peer is not None
                key = instruction.writes[0].value, instruction.peer, device
                if instruction.peer == HOST:
                    self.check_host_gives(key[0])
                elif not self.mail[key]:
                    return False
                else:
                    self.mail[key] -= 1
                self.write(device, instruction.writes[0])
            case Op.FREE:
                self.read(device, instruction.reads[0])
                del self.buffers[device][_buffer(instruction.reads[0])]
        return True

    def read(self, device: int, operand: Operand) -> Value:
        held = self.buffers[device].get(_buffer(operand))
        if held != operand.value:
            raise ExecutionError(f"device {device} reads {operand}, which holds {held}")
        return operand.value

    def write(self, device: int, operand: Operand) -> None:
        held = self.buffers[device].get(_buffer(operand))
        if held is not None or operand.slot is None:
            raise ExecutionError(f"device {device} writes {operand}, which holds {held}")
        self.buffers[device][_buffer(operand)] = operand.value

    def compute(self, device: int, instruction: Instruction, action: Action) -> None:
        if self.program.placement[action.stage] != device or action.microbatch not in range(
            self.program.n_microbatches
        ):
            raise ExecutionError(f"{action} on device {device}")
        if action.kind is Kind.WEIGHT_GRAD and not self.ran[Action(action.stage, Kind.INPUT_GRAD, action.microbatch)]:
            raise ExecutionError(f"{action} before its I")
        self.ran[action] += 1
        found = sorted(str(self.read(device, operand)) for operand in instruction.reads)
        made = sorted(str(operand.value) for operand in instruction.writes)
        if (found, made) != (sorted(map(str, self.must_read(action))), sorted(map(str, self.must_write(action)))):
            raise ExecutionError(f"{action} read {found}, made {made}")
        for operand in instruction.writes:
            self.write(device, operand)

    def must_read(self, action: Action) -> list[Value]:
        s, m = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Value(r.value, m) for r in self.program.routes if s in r.consumers]
        if action.kind is Kind.WEIGHT_GRAD:
            return [saved(s, m)]
        grads = [Value(r.value, m, c) for r in self.program.routes if r.gradient and r.source == s for c in r.consumers]
        return [saved(s, m), *grads]

    def must_write(self, action: Action) -> list[Value]:
        s, m = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Value(r.value, m) for r in self.program.routes if r.source == s] + [saved(s, m)] * self.trained
        if action.kind is Kind.WEIGHT_GRAD:
            return []
        return [Value(r.value, m, s) for r in self.program.routes if r.gradient and s in r.consumers]

    def check_host_gives(self, value: Value) -> None:
        route = next((r for r in self.program.routes if r.value == value.name), None)
        if route is None or value.microbatch not in range(self.program.n_microbatches):
            raise ExecutionError(f"the host has no {value}")
        if not (route.source == HOST if value.consumer is None else value.consumer == HOST and HOST in route.consumers):
            raise ExecutionError(f"the host has no {value}")

    def check_end(self) -> None:
        if left := [value for buffers in self.buffers for value in buffers.values()]:
            raise ExecutionError(f"not freed: {left}")
        cells = product(range(self.program.n_stages), range(self.program.n_microbatches))
        wanted = Counter(Action(s, Kind(letter), m) for s, m in cells for letter in self.letters(s, m))
        if wanted != self.ran:
            raise ExecutionError("not every action ran once")
        if +Counter(self.mail) != Counter(self.for_host()):
            raise ExecutionError("the host does not have what it should, or a message was not received")

    def letters(self, stage: int, microbatch: int) -> str:
        return "F" if not self.trained else "FIW" if (stage, microbatch) in self.split else "FB"

    def for_host(self) -> list[tuple[Value, int, int]]:
        place, takes = self.program.placement, []
        for r in self.program.routes:
            for m in range(self.program.n_microbatches):
                if r.source != HOST and HOST in r.consumers:
                    takes.append((Value(r.value, m), place[r.source], HOST))
                if r.source == HOST and r.gradient and self.trained:
                    takes += [(Value(r.value, m, c), place[c], HOST) for c in r.consumers if c != HOST]
        return takes


def _buffer(operand: Operand) -> Buffer:
    return operand.value.name, operand.value.consumer, operand.slot
