"""All states that the devices of a program can reach, under a model of communication: no order of events is left out.

    state    per device, the number of its instructions that are over

What has been sent and received follows from these numbers. Nothing of the verifiers is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipecompile.ir import HOST, Op, Program

Step = tuple[str, int]
"""("local", -1) for what no other device sees, ("send", message) or ("receive", message)."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The number of states reached, and the violations: states in which nothing can happen, and messages that arrive in another
    order than they are received.
    """

    states: int
    deadlocks: int
    mismatches: int

    @property
    def is_safe(self) -> bool:
        """Return whether every order of events ends, with every message where it is expected."""
        return not self.deadlocks and not self.mismatches


def explore(program: Program, model: str) -> Explored:
    """Visit every reachable state under "buffered", "rendezvous" or "fifo". Exponential in the number of devices."""
    space = _Space(program, model)
    start = (0,) * len(space.rows)
    seen, todo, deadlocks, mismatches = {start}, [start], 0, 0
    while todo:
        state = todo.pop()
        after = list(space.after(state))
        if not after and any(place < len(row) for place, row in zip(state, space.rows, strict=True)):
            deadlocks += 1
        for following in after:
            if following is None:
                mismatches += 1
            elif following not in seen:
                seen.add(following)
                todo.append(following)
    return Explored(len(seen), deadlocks, mismatches)


class _Space:
    """The steps of each device, and where each message is sent and received: (device, index of the step)."""

    def __init__(self, program: Program, model: str) -> None:
        self.model = model
        numbers: dict[object, int] = {}
        self.rows: list[list[Step]] = [[] for _ in program.rows]
        self.sent: dict[int, tuple[int, int]] = {}
        self.received: dict[int, tuple[int, int]] = {}
        self.queues: dict[tuple[int, int], list[int]] = {}
        for device, row in enumerate(program.rows):
            for place, instruction in enumerate(row):
                peer, step = instruction.peer, ("local", -1)
                if instruction.op is Op.SEND and peer not in (HOST, None):
                    number = numbers.setdefault((instruction.reads[0].value, device, peer), len(numbers))
                    step, self.sent[number] = ("send", number), (device, place)
                    self.queues.setdefault((device, peer), []).append(number)
                elif instruction.op is Op.RECV and peer not in (HOST, None):
                    number = numbers.setdefault((instruction.writes[0].value, peer, device), len(numbers))
                    step, self.received[number] = ("receive", number), (device, place)
                self.rows[device].append(step)

    def after(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
        """Yield the states after one event; None for a message that arrives where another is expected."""
        for device, place in enumerate(state):
            if place == len(self.rows[device]):
                continue
            kind, message = self.rows[device][place]
            if kind == "local" or (kind == "send" and self.model != "rendezvous"):
                yield _moved(state, device)
            elif kind == "send" and state[self.received[message][0]] == self.received[message][1]:
                yield _moved(_moved(state, device), self.received[message][0])
            elif kind == "receive" and self.model == "buffered" and self._is_sent(message, state):
                yield _moved(state, device)
            elif kind == "receive" and self.model == "fifo":
                head = self._head(self.sent[message][0], device, state)
                if head is not None:
                    yield _moved(state, device) if head == message else None

    def _is_sent(self, message: int, state: tuple[int, ...]) -> bool:
        device, place = self.sent[message]
        return state[device] > place

    def _head(self, source: int, target: int, state: tuple[int, ...]) -> int | None:
        """Return the first message of a queue that is sent and not received; None if there is none."""
        for message in self.queues[source, target]:
            if not self._is_sent(message, state):
                return None
            if state[target] <= self.received[message][1]:
                return message
        return None


def _moved(state: tuple[int, ...], device: int) -> tuple[int, ...]:
    return (*state[:device], state[device] + 1, *state[device + 1 :])
