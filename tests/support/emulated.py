"""Devices that are threads: every stream a queue, every launch late by chance, memory that is given back overwritten at once.

    host      launch 0F0   launch SEND   launch FREE   launch 0F1 ...     goes on at once, as with CUDA
    compute 0     ...zz 0F0 ■   zz FREE: NaN   z 0F1                      in order, each after a delay
    copy 0►1               z wait ■ zzz NaN, SEND ■                       the buffer is overwritten first

    compute 0     ... 0F1   FREE @0.o#0   0B1 ■                           what RELOAD writes is memory that compute gave back last
    from store                                └─ NaN, 0RELOAD0 ■

What the host puts into a register stands for a tensor to come. A missing wait reads too early, an early free reads NaN. Memory
that a copy writes was given back to that copy: whoever still reads what was there reads NaN.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import sleep
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

import pipecompile as pc
from pipecompile.driver.programs import step_schedule
from pipecompile.ir import HOST, Op, Program
from pipecompile.ir.training_routes import training_routes
from pipecompile.passes import lower
from pipecompile.runtime import interpreter
from pipecompile.runtime.cells.offload import HostBuffer, OffloadedGraph
from pipecompile.runtime.cells.stage_cells import loss_cells
from pipecompile.runtime.executable import Executable, ProgramBinding
from pipecompile.runtime.interpreter import bind
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import STORE, Lane, Place, launches
from pipecompile.runtime.streams import StreamTask
from pipecompile.runtime.transport import Link
from pipecompile.torch_private.autograd_engine import other_users
from tests.support.launch_mutants import Launches, Mutant

__all__ = ["EmulatedExecutable", "EmulatedStreams"]


@dataclass(slots=True)
class Handle:
    """A value to come; its memory may be given back before, when nobody waited."""

    value: Any = None
    is_given_back: bool = False


@dataclass(slots=True)
class Device:
    """What a launch sees of the frame: registers hold values, by now."""

    registers: dict[int, Any]
    frame: Frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)


class Copy(Link):
    """Into memory of its own."""

    def send(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, _copied, value)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@dataclass
class EmulatedStreams:
    """Between any two devices copies run beside compute. `most` is the longest delay in seconds."""

    seed: int = 0
    most: float = 2e-4
    errors: list[BaseException] = field(default_factory=list)
    lanes: dict[Lane, EmulatedStream] = field(default_factory=dict)
    slow: dict[Place, float] = field(default_factory=dict)
    freed: dict[int, Handle] = field(default_factory=dict)

    def apart(self, source: int, target: int) -> bool:
        return source != target

    def stream(self, lane: Lane) -> EmulatedStream:
        if lane not in self.lanes:
            self.lanes[lane] = EmulatedStream(self, lane, random.Random(f"{self.seed} {lane}"))
        return self.lanes[lane]

    def link(self, source: int, target: int) -> Link:
        return Copy()

    def fork(self, frame: Frame) -> None:
        """Everything that was launched before is over: a run ends with `finish`."""

    def reseed(self, seed: int) -> None:
        """Other delays from now on."""
        self.errors.clear()
        self.slow = {}
        for lane, stream in self.lanes.items():
            stream.chance = random.Random(f"{seed} {lane}")
            stream.pace = stream.chance.choice((0.0, 0.1, 1.0))

    def delay(self, places: set[Place], seconds: float) -> None:
        """These launches are slow, all others are fast."""
        self.errors.clear()
        self.slow = dict.fromkeys(places, seconds)
        for stream in self.lanes.values():
            stream.pace = 0.0

    def finish(self) -> None:
        """Wait for everything that was launched. Raises what a launch raised."""
        for stream in self.lanes.values():
            stream.record(None).latest.wait()
        if self.errors:
            raise self.errors[0]

    def join(self) -> None:
        """Nothing: a run ends with `finish`."""

    def release(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda tensor: None

    def allocator(self, index: int) -> Callable[[int], torch.Tensor]:
        return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        for stream in self.lanes.values():
            stream.queue.put(None)


class EmulatedEvent:
    """An event that can be recorded again: a wait is for the recording that was the latest when the host asked for it."""

    def __init__(self) -> None:
        self.latest = threading.Event()


class EmulatedStream:
    def __init__(self, streams: EmulatedStreams, lane: Lane, chance: random.Random) -> None:
        self.streams, self.lane = streams, lane
        self.is_compute, self.is_upload = lane[0] == lane[1], lane[0] == HOST
        self.chance, self.pace = chance, 1.0
        self.queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_work, args=(self.queue, streams), daemon=True).start()

    def run(self, task: StreamTask, frame: Frame) -> None:
        given = {index: frame.registers[index] for index in task.reads}
        before = [] if self.is_compute else [frame.registers[index] for index in task.writes[:1]]
        if task.op is Op.FREE:
            (index,) = task.reads
            frame.registers[index] = None
            self.streams.freed[self.lane[0]] = given[index]
            self._later(task, lambda: self._give_back(given[index]))
            return
        first = Handle()  # what receives writes a buffer and a register: one tensor
        is_received = not self.is_compute and task.op is Op.RECV
        made = {index: first if is_received else Handle() for index in task.writes}
        for index, handle in made.items():
            frame.registers[index] = handle
        taken = self.streams.freed.get(self.lane[1]) if self.lane[0] == STORE else None

        def late() -> None:
            if taken is not None and not taken.is_given_back:
                _overwrite(taken.value)
            for handle in before:
                if handle is not None and not (self.is_upload and _is_held(handle)):
                    _overwrite(handle.value)
            device = Device({index: handle.value for index, handle in given.items()}, frame)
            task.run(device)  # type: ignore[arg-type]
            for index, handle in given.items():
                handle.value = device.registers[index]
            for index, handle in made.items():
                handle.value = device.registers[index]
                if handle.is_given_back:
                    _overwrite(handle.value)

        self._later(task, late)

    def _give_back(self, handle: Handle) -> None:
        """Overwrite the memory. What a device sent may be part of what its stage saved, and is not given back then."""
        handle.is_given_back = True
        if not (self.is_compute and _is_held(handle)):
            _overwrite(handle.value)

    def _later(self, task: StreamTask, work: Any) -> None:
        delay = (
            self.streams.slow.get(task.place, 0.0) + (0.5 + self.chance.random() ** 3) * self.pace * self.streams.most
        )
        self.queue.put(lambda: (sleep(delay) if delay else None, work()))

    def record(self, event: EmulatedEvent | None) -> EmulatedEvent:
        event = event or EmulatedEvent()
        latest = event.latest = threading.Event()
        self.queue.put(latest.set)
        return event

    def wait(self, event: EmulatedEvent) -> None:
        self.queue.put(event.latest.wait)


def _work(queue: SimpleQueue[Any], streams: EmulatedStreams) -> None:
    while (work := queue.get()) is not None:
        try:
            with torch.enable_grad():
                work()
        except BaseException as error:
            streams.errors.append(error)
        del work


def _overwrite(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value.data.fill_(float("nan"))
    for memory in _bytes_in(value):
        if isinstance(value, OffloadedGraph) or not other_users(memory):
            memory.fill_(0xFF)


def _bytes_in(value: Any) -> list[torch.Tensor]:
    """What a forward saved: on the device before its OFFLOAD, on the device after it, or on the host."""
    if isinstance(value, OffloadedGraph):
        return [one for one in (value.tensors.storages if value.tensors else ()) if one is not None]
    return value.tensors if isinstance(value, HostBuffer) else value if isinstance(value, list) else []


def _is_held(handle: Handle) -> bool:
    """Does anybody but the handle hold the tensor, or another tensor its memory?"""
    value = handle.value
    if not isinstance(value, torch.Tensor):
        return False
    storage = value.untyped_storage()
    return sys.getrefcount(value) > ALONE + 1 or bool(torch._C._storage_Use_Count(storage._cdata) > ALONE)


ALONE = 2
"""Users of a tensor that nobody holds but the handle, and who asks; so, of a storage, its tensor, and who asks."""


class EmulatedExecutable(Executable):
    """A program on emulated devices; a run ends when everything that was launched is over, and leaves nothing behind."""

    def __init__(
        self,
        pipe: pc.Pipeline,
        count: int,
        damage: Callable[[Program], Program] | None = None,
        streams: EmulatedStreams | None = None,
    ) -> None:
        build = pipe._cache.latest
        ways = training_routes(build.routes, len(build.stages), with_target=False)
        sound = lower(step_schedule(build, count), ways, overlap=True)
        program = sound if damage is None else damage(sound)
        self.was_harmed = program != sound
        cells = loss_cells(build.stages, build.codes, ways, build.outputs, pipe._options.loss_fn)
        super().__init__(ProgramBinding(program, cells, pipe.devices, build.graph, build.mirrors))
        self.streams, self.key = streams or EmulatedStreams(), ("step", count, False)
        build.executables[self.key] = self
        self.n_runs = self.n_threaded_runs = 0
        self.bind(launches(program, self.streams.apart))

    def bind(self, planned: Launches) -> None:
        """From now on, launch like this."""
        with patch.object(interpreter, "launches", lambda *_: planned):
            for name, threaded in (("inline", False), ("threaded", True)):
                code = bind(self.program, self.cells, self.devices, threaded=threaded, streams=self.streams)
                self.__dict__[name] = code
                self._idle[threaded].clear()
        self.n_buffers = len({launch.buffer for row in planned for launch in row} - {None})

    def suffer(self, mutant: Mutant, seconds: float = 0.02) -> None:
        """Launch like this, what has to be late for it to show so late."""
        self.bind(mutant.launches)
        self.streams.delay(mutant.late(self.program), seconds)

    def run(self, code: Any, frame: Frame, workers: Any = None) -> None:
        self.n_runs += 1
        self.n_threaded_runs += code.threaded
        super().run(code, frame, workers)
        self.streams.finish()
        held = sum(register is not None for register in frame.registers)
        assert held <= self.n_buffers, "something was not freed"
