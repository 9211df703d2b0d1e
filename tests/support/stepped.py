"""Emulated devices without threads: the host lets them work at its launches, as many launches and of those streams as chance says.

    host        launch 0F0   launch SEND   launch 0F1   launch FREE ...  finish
    devices          0F0 ■                 (nothing)        0F1  wait ■  SEND  FREE: NaN        one after another, in some legal order

A seed stands for one order: each stream has a pace, the host is fast, even with the devices, or waits for all of them, and it may stand
still for once. So a timing costs a millisecond and comes again with its seed. Launches whose lateness is asked for are chosen
only when nothing else can go on. Each device can have a random generator of its own, as GPUs have.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import torch

from pipecompile.ir import HOST
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import Lane, Place
from pipecompile.runtime.streams import StreamTask
from tests.support.emulated import EmulatedStream, EmulatedStreams

__all__ = ["SteppedStreams", "own_generator"]

HOSTS = (0.0, 0.0, 0.3, 0.6, 0.9, 1.2)
"""Launches that devices do for each launch of the host: none before it is through, ..., more than there are."""

PACES = (0.05, 1.0, 1.0, 5.0)
"""Chances of a stream, beside others, to do the next launch."""


@dataclass
class Recording:
    """One recording of an event."""

    is_over: bool = False


class SteppedEvent:
    """An event that can be recorded again: a wait is for the recording that was the latest when the host asked for it."""

    def __init__(self) -> None:
        self.latest = Recording()


@dataclass
class SteppedStreams(EmulatedStreams):
    """`host` is how many launches the devices do at a launch of the host. `yields`: the chance that a thread of the host lets others go on."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    host: float = 1.0
    yields: float = 0.0
    stands_at: int = -1
    n_launched: int = 0
    has_passed: bool = False
    orders: set[int] = field(default_factory=set)
    order: int = 0
    lock: Any = field(default_factory=threading.RLock)
    generators: dict[int, torch.Tensor] | None = None

    def stream(self, lane: Lane) -> SteppedStream:
        with self.lock:
            if lane not in self.lanes:
                self.lanes[lane] = SteppedStream(self, lane)
            return self.lanes[lane]  # type: ignore[return-value]

    def reseed(self, seed: int) -> None:
        self.errors.clear()
        self.slow, self.chance = {}, random.Random(seed)
        self.host, self.yields = self.chance.choice(HOSTS), self.chance.choice((0.0, 0.1, 0.5))
        self.stands_at = self.chance.randrange(400)
        for stream in self.lanes.values():
            stream.pace = self.chance.choice(PACES)

    def delay(self, places: set[Place], seconds: float) -> None:
        """These launches come when nothing else can; the host is through before."""
        super().delay(places, seconds)
        self.host, self.yields, self.stands_at = 0.0, 0.0, -1
        for stream in self.lanes.values():
            stream.pace = 1.0

    def fork(self, frame: Frame) -> None:
        self.n_launched, self.order = 0, 0

    def launched(self) -> None:
        """Let the devices work, since the host has launched something."""
        self.n_launched += 1
        if self.n_launched == self.stands_at:
            self.step(1 << 30)
        whole = int(self.host)
        self.step(whole + (self.chance.random() < self.host - whole))

    def step(self, most: int) -> None:
        """Do so many launches, each the next one of a stream that need not wait."""
        for _ in range(most):
            ready = self._ready()
            if not ready:
                return
            fast = [stream for stream in ready if stream.works[0][0] not in self.slow] if self.slow else ready
            choices = fast or ready
            stream = choices[0] if len(choices) == 1 else self.chance.choices(choices, [s.pace for s in choices])[0]
            place, work = stream.works.popleft()
            self.order = hash((self.order, place))
            with own_generator(self.generators if stream.is_compute else None, stream.lane[0]):
                self._do(work)
            stream.record_events()

    def _ready(self) -> list[Any]:
        """Return the streams whose next launch waits for nothing. A stream that passes over a wait may free others from theirs."""
        lanes: list[Any] = list(self.lanes.values())
        while True:
            self.has_passed = False
            ready = [stream for stream in lanes if stream.works and stream.is_ready()]
            if ready or not self.has_passed:
                return ready

    def _do(self, work: Callable[[], None]) -> None:
        try:
            with torch.enable_grad():
                work()
        except BaseException as error:
            self.errors.append(error)

    def finish(self) -> None:
        with self.lock:
            self.step(1 << 30)
            stuck = [lane for lane, stream in self.lanes.items() if stream.works]
            for stream in self.lanes.values():
                stream.works.clear()
            self.orders.add(self.order)
        if self.errors:
            raise self.errors[0]
        assert not stuck, f"streams wait for each other: {stuck}"

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def own_generator(states: dict[int, torch.Tensor] | None, device: int) -> Iterator[None]:
    """Let random numbers be drawn from the generator of a device, which its number seeds."""
    if states is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(states.setdefault(device, torch.Generator().manual_seed(device).get_state()))
    try:
        yield
    finally:
        states[device] = torch.get_rng_state()
        torch.set_rng_state(before)


class SteppedStream(EmulatedStream):
    """A queue of launches, of waits (place None, work None) and of recordings."""

    def __init__(self, streams: SteppedStreams, lane: Lane) -> None:
        self.streams, self.lane = streams, lane
        self.is_compute, self.is_upload = lane[0] == lane[1], lane[0] == HOST
        self.pace = 1.0
        self.works: deque[tuple[Any, Any]] = deque()

    def is_ready(self) -> bool:
        """Pass over waits for what is over. Return whether a launch is next."""
        while self.works:
            _, work = self.works[0]
            if not isinstance(work, Recording):
                return True
            if not work.is_over:
                return False
            self.works.popleft()
            self.streams.has_passed = True  # type: ignore[attr-defined]
            self.record_events()
        return False

    def record_events(self) -> None:
        """Do the recordings that are next."""
        while self.works and self.works[0][0] == "record":
            self.works.popleft()[1].is_over = True

    def _later(self, task: StreamTask, work: Any) -> None:
        streams: Any = self.streams
        with streams.lock:
            self.works.append((task.place, work))
            streams.launched()
            is_yielding = streams.chance.random() < streams.yields
        if is_yielding and threading.current_thread() is not threading.main_thread():
            sleep(0)

    def record(self, event: Any) -> Any:
        event = event or SteppedEvent()
        with self.streams.lock:  # type: ignore[attr-defined]
            event.latest = Recording()
            self.works.append(("record", event.latest))
            self.record_events()
        return event

    def wait(self, event: Any) -> None:
        with self.streams.lock:  # type: ignore[attr-defined]
            self.works.append(("wait", event.latest))
