"""Runs a program by brute force, with labels in place of tensors, and says what goes wrong first.

Buffers hold the label of what was written last. A device is stepped until it waits; when none moves, it is over. It
knows no pass and no verifier, only what each instruction means, what each action has to compute, and how messages travel:
"buffered" (a send never waits), "rendezvous" (a send waits until its receive is next), "fifo" (one queue per pair of devices).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise, product

from pipecompile.ir import (
    HOST,
    NO_MICROBATCH,
    SHARDING,
    UNTRAINED,
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Program,
    Route,
    Tie,
    Value,
    held,
    offloaded,
    recipe,
    saved,
    weight_saved,
)

Buffer = tuple[str, int | None, int | None]
MODELS = ("buffered", "rendezvous", "fifo")


class ExecutionError(Exception):
    """The program does not do what it should."""


def execute(program: Program, models: Sequence[str] = MODELS) -> None:
    """Return when the program computes the right thing and leaves nothing behind. Raises ExecutionError."""
    for model in models:
        try:
            _Execution(program, model).run()
        except (KeyError, IndexError) as error:
            raise ExecutionError(f"no such thing: {error}") from error


class _Execution:
    def __init__(self, program: Program, model: str) -> None:
        self.program, self.model = program, model
        self.rows = [deque(row) for row in program.rows]
        self.buffers: list[dict[Buffer, Value]] = [{} for _ in program.rows]
        self.mail: dict[tuple[int, int], deque[Value]] = {}
        self.ran: Counter[Action] = Counter()
        self.arrived: Counter[tuple[str, int]] = Counter()
        self.waits_at: dict[int, str] = {}
        actions = [i.action for row in program.rows for i in row if i.action]
        self.trained = any(action.kind not in UNTRAINED for action in actions)
        self.split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.INPUT_GRAD}
        self.again = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE}
        self.moved = {(a.stage, a.microbatch) for a in actions if a.kind in (Kind.OFFLOAD, Kind.RELOAD)}
        self.gathered = {action.stage for action in actions if action.kind is Kind.UNSHARD}
        self.whole, self.reduced = set[int](), Counter[int]()
        self.ties = {tie.name: tie for tie in program.ties if len(self.holders(tie)) > 1}

    def holders(self, tie: Tie) -> set[int]:
        placements = (self.program.placement, *(one.placement for one in self.program.directions))
        return {placement[stage] for placement in placements for stage in tie.stages}

    def placement(self, microbatch: int) -> tuple[int, ...]:
        """That of the direction of a micro-batch. No micro-batch has two."""
        found = [one.placement for one in self.program.directions if microbatch in one.microbatches]
        return found[0] if found else self.program.placement

    def run(self) -> None:
        moved = True
        numbers = Counter(m for one in self.program.directions for m in one.microbatches)
        if any(count > 1 for count in numbers.values()):
            raise ExecutionError("a micro-batch has two directions")
        while moved:
            moved = False
            for device, row in enumerate(self.rows):
                while row and self.step(device, row[0]):
                    row.popleft()
                    moved = True
        if any(self.rows):
            raise ExecutionError("deadlock: " + ", ".join(str(row[0]) for row in self.rows if row))
        self.check_end()

    def check_pair(self, device: int, first: Action) -> None:
        """The next instruction runs at the same time: it computes, and all that it reads is there now."""
        second = self.rows[device][1]
        kinds = first.kind.value + (second.action.kind.value if second.action else "")
        if second.op is not Op.COMPUTE or kinds not in ("FB", "FI"):
            raise ExecutionError(f"{first} overlaps with {second}")
        for operand in second.reads:
            self.read(device, operand)

    def step(self, device: int, instruction: Instruction) -> bool:
        if instruction.overlaps and instruction.op is not Op.COMPUTE:
            raise ExecutionError(f"{instruction} cannot overlap")
        match instruction.op:
            case Op.COMPUTE:
                assert instruction.action is not None
                if instruction.overlaps:
                    self.check_pair(device, instruction.action)
                self.compute(device, instruction, instruction.action)
            case Op.SEND:
                return self.send(device, instruction)
            case Op.RECV:
                return self.receive(device, instruction)
            case Op.FREE:
                self.read(device, instruction.reads[0])
                del self.buffers[device][_buffer(instruction.reads[0])]
            case Op.BROADCAST | Op.REDUCE:
                return self.exchange(device, instruction)
        return True

    def send(self, device: int, instruction: Instruction) -> bool:
        peer = instruction.peer
        assert peer is not None
        value = self.read(device, instruction.reads[0])
        if peer == device:
            raise ExecutionError("a device cannot send to itself")
        if self.model == "rendezvous" and peer != HOST:
            row = self.rows[peer]
            if not (row and row[0].op is Op.RECV and row[0].peer == device and row[0].writes[0].value == value):
                return False
        self.mail.setdefault((device, peer), deque()).append(value)
        return True

    def receive(self, device: int, instruction: Instruction) -> bool:
        peer, value = instruction.peer, instruction.writes[0].value
        assert peer is not None
        if peer == HOST:
            self.check_host_gives(value)
        else:
            mail = self.mail.setdefault((peer, device), deque())
            if not mail if self.model == "fifo" else value not in mail:
                return False
            if self.model == "fifo" and mail[0] != value:
                raise ExecutionError(f"device {device} takes {mail[0]} for {value}")
            mail.remove(value)
        self.write(device, instruction.writes[0])
        return True

    def exchange(self, device: int, instruction: Instruction) -> bool:
        """All devices of the tie meet. Before its BROADCAST a parameter must not be used, after its REDUCE neither."""
        tie, name = self.ties[instruction.tie or ""], str(instruction)
        if device not in self.holders(tie):
            raise ExecutionError(f"{name} on device {device}")
        if self.waits_at.get(device) != name:
            self.waits_at[device] = name
            self.arrived[name, device] += 1
        if any(not self.arrived[name, other] for other in self.holders(tie)):
            return False
        self.waits_at.pop(device)
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
        s, m = action.stage, action.microbatch
        if action.kind in SHARDING:
            self.shard(device, instruction, action)
            return
        if m not in range(self.program.n_microbatches) or self.placement(m)[s] != device:
            raise ExecutionError(f"{action} on device {device}")
        self.check_parameters(action)
        if action.kind is Kind.WEIGHT_GRAD and not self.ran[Action(s, Kind.INPUT_GRAD, m)]:
            raise ExecutionError(f"{action} before its I")
        for name, tie in self.ties.items():
            if s in tie.stages and not (
                self.arrived[f"BROADCAST {name}", device] and not self.arrived[f"REDUCE {name}", device]
            ):
                raise ExecutionError(f"{action} uses {name} before it is there, or after it was reduced")
        self.ran[action] += 1
        found = sorted(str(self.read(device, operand)) for operand in instruction.reads)
        made = sorted(str(operand.value) for operand in instruction.writes)
        if (found, made) != (sorted(map(str, self.must_read(action))), sorted(map(str, self.must_write(action)))):
            raise ExecutionError(f"{action} read {found}, made {made}")
        for operand in instruction.writes:
            self.write(device, operand)

    def shard(self, device: int, instruction: Instruction, action: Action) -> None:
        s = action.stage
        if self.program.directions or self.program.placement[s] != device or action.microbatch != NO_MICROBATCH:
            raise ExecutionError(f"{action} on device {device}")
        if instruction.reads or instruction.writes:
            raise ExecutionError(f"{action} has operands")
        if action.kind is Kind.REDUCE_GRAD:
            self.reduced[s] += 1
        elif (action.kind is Kind.RESHARD) != (s in self.whole):
            raise ExecutionError(f"{action} twice")
        else:
            self.whole ^= {s}

    def check_parameters(self, action: Action) -> None:
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            return
        if action.stage in self.gathered - self.whole:
            raise ExecutionError(f"{action} has no parameters")
        if self.reduced[action.stage] and action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            raise ExecutionError(f"{action} adds to gradients that are reduced")

    def must_read(self, action: Action) -> list[Value]:
        s, m = action.stage, action.microbatch
        inputs = [Value(r.value, m) for r in self.program.routes if s in r.consumers]
        if action.kind is Kind.FORWARD:
            return inputs
        if action.kind is Kind.RECOMPUTE:
            return [*inputs, recipe(s, m)]
        if action.kind is Kind.WEIGHT_GRAD:
            return [weight_saved(s, m)]
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            return [(offloaded if action.kind is Kind.OFFLOAD else held)(s, m)]
        pairs = [(r, c) for r in self.program.routes if r.gradient for c in r.consumers if _reader(r, c) == s]
        return [saved(s, m), *(Value(r.value, m, c) for r, c in pairs)]

    def must_write(self, action: Action) -> list[Value]:
        s, m = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            keeps = offloaded if (s, m) in self.moved else recipe if (s, m) in self.again else saved
            kept = [keeps(s, m)] * self.trained
            return [Value(r.value, m) for r in self.program.routes if r.source == s] + kept
        if action.kind is Kind.RECOMPUTE:
            return [saved(s, m)]
        if action.kind is Kind.WEIGHT_GRAD:
            return []
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            return [(held if action.kind is Kind.OFFLOAD else saved)(s, m)]
        left = [weight_saved(s, m)] if action.kind is Kind.INPUT_GRAD else []
        return [Value(r.value, m, s) for r in self.program.routes if r.gradient and s in r.consumers] + left

    def check_host_gives(self, value: Value) -> None:
        route = next((r for r in self.program.routes if r.value == value.name), None)
        if route is None or value.microbatch not in range(self.program.n_microbatches):
            raise ExecutionError(f"the host has no {value}")
        if not (route.source == HOST if value.consumer is None else value.consumer == HOST and HOST in route.consumers):
            raise ExecutionError(f"the host has no {value}")

    def check_end(self) -> None:
        if left := [value for buffers in self.buffers for value in buffers.values()]:
            raise ExecutionError(f"not freed: {left}")
        due = {s: 1 for s in self.gathered if self.trained}
        if self.whole or any(self.reduced[s] not in (due.get(s, 0), int(self.trained)) for s in self.reduced | due):
            raise ExecutionError("parameters are left, or a gradient is not reduced once")
        cells = product(range(self.program.n_stages), range(self.program.n_microbatches))
        wanted = Counter(Action(s, Kind(word), m) for s, m in cells for word in self.words(s, m))
        if self.moved & self.again:
            raise ExecutionError("a cell is recomputed and offloaded")
        if wanted != self.ran:
            raise ExecutionError("not every action ran once")
        arrived = Counter((value, *pair) for pair, values in self.mail.items() for value in values)
        if arrived != Counter(self.for_host()):
            raise ExecutionError("the host does not have what it should, or a message was not received")
        exchanges = ["BROADCAST", "REDUCE"] if self.trained else ["BROADCAST"]
        held = [(name, device) for name, tie in self.ties.items() for device in self.holders(tie)]
        if self.arrived != Counter((f"{word} {name}", device) for name, device in held for word in exchanges):
            raise ExecutionError("a tied parameter is not exchanged once")

    def words(self, stage: int, microbatch: int) -> list[str]:
        if not self.trained:
            return ["F"]
        cell = stage, microbatch
        moves = ["OFFLOAD", "RELOAD"] * (cell in self.moved)
        return ["F", *["R"] * (cell in self.again), *moves, *("IW" if cell in self.split else "B")]

    def for_host(self) -> list[tuple[Value, int, int]]:
        takes = []
        for r in self.program.routes:
            for m in range(self.program.n_microbatches):
                place = self.placement(m)
                if r.source != HOST and HOST in r.consumers:
                    takes.append((Value(r.value, m), place[r.source], HOST))
                if r.source == HOST and r.gradient and self.trained:
                    takes += [(Value(r.value, m, c), place[c], HOST) for c in r.consumers if _reader(r, c) == HOST != c]
        return takes


def _reader(route: Route, consumer: int) -> int:
    """The stage that reads a consumer's gradient: the next one of its sum, else the source."""
    following = [b for group in route.sums for a, b in pairwise(group) if a == consumer]
    return following[0] if following else route.source


def _buffer(operand: Operand) -> Buffer:
    return operand.value.name, operand.value.consumer, operand.slot
