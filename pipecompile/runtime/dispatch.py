"""Who walks the instruction lists: this thread, in one merged order, or a persistent thread per device.

    inline    0F0 1F0 0F1 1F1 ...         12 to 19 us a cell; the choice when cells are small or cores are busy
    threads   device 0: 0F0 0F1 ...       the choice when cells take longer than a thread's wake-up and cores are idle
              device 1:     1F0 1F1 ...

Both run the same code on the same program, so both give the same numbers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from pipecompile.ir import Program
from pipecompile.runtime import watchdog
from pipecompile.runtime.interpreter import ABORT, Aborted, Code
from pipecompile.runtime.registers import Frame, Spans
from pipecompile.runtime.watchdog import Watchdog
from pipecompile.tracing.ambient_modes import contained

__all__ = ["Ambience", "Crew", "Dispatcher", "Failure", "choose", "run_inline"]


class Failure(Exception):
    """Instruction `index` of `device` raised `error`."""

    def __init__(self, device: int, index: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.device, self.index, self.error = device, index, error


def run_inline(code: Code, frame: Frame) -> None:
    """All devices from this thread. Raises Failure."""
    position, begun = -1, perf_counter()  # noqa: F841 the watchdog reads both
    WATCHDOG.start()
    try:
        for position, run in enumerate(code.flat):  # noqa: B007 read when one raises
            run(frame)
    except BaseException as error:
        raise Failure(*code.order[position], error) from error


def _standing(call: FrameType) -> tuple[object, str]:
    """Which call of `run_inline` this is, and where."""
    known = call.f_locals
    code, position = known["code"], max(known.get("position", 0), 0)
    device, index = code.order[position]
    return (id(code), known.get("begun")), f"device {device} at {code.program.rows[device][index]}"


WATCHDOG = Watchdog(run_inline.__code__, _standing)


@dataclass(frozen=True, slots=True)
class Ambience:
    """Thread-local state of the caller that workers take over: grad mode, autocast, intra-op threads, CUDA streams."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    threads: int
    streams: tuple[Any, ...]

    @classmethod
    def here(cls, n_workers: int, devices: tuple[torch.device, ...]) -> Ambience:
        gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        kinds = ("cpu", "cuda") if gpus else ("cpu",)
        autocast = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        threads = max(1, torch.get_num_threads() // n_workers)
        return cls(torch.is_grad_enabled(), autocast, threads, tuple(map(torch.cuda.current_stream, gpus)))

    def enter(self, stack: ExitStack) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype, enabled in self.autocast:
            if enabled != torch.is_autocast_enabled(kind) or enabled:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        for stream in self.streams:
            torch.cuda.set_stream(stream)


Job = Callable[[], None]


class Crew:
    """One persistent thread per device. They idle between steps, and end when the crew is collected."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self.jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in devices]
        for index, queue in enumerate(self.jobs):
            Thread(target=_work, args=(queue,), name=f"pipecompile-{index}", daemon=True).start()
        weakref.finalize(self, _dismiss, self.jobs)

    def run(self, code: Code, frame: Frame) -> None:
        """Run every device's row. Returns when all threads are idle again; raises the first Failure."""
        ambience = Ambience.here(len(self.jobs), self.devices)
        done: SimpleQueue[Failure | None] = SimpleQueue()
        at = [0] * len(self.jobs)
        for device, queue in enumerate(self.jobs):
            queue.put(_job(code, frame, device, ambience, done, at))
        failures: list[Failure | None] = []
        try:
            while len(failures) < len(self.jobs):
                failures.append(_watched(done, at, code.program))
        except BaseException:  # Ctrl-C: leave with all threads idle
            _abort(frame)
            while len(failures) < len(self.jobs):
                failures.append(done.get())
            raise
        for failure in failures:
            if failure is not None:
                raise failure


def _watched(done: SimpleQueue[Failure | None], at: list[int], program: Program) -> Failure | None:
    """The next device that is through. Warns with where every device is when all stand still for long."""
    seen, is_told = list(at), False
    while True:
        try:
            return done.get(timeout=watchdog.PATIENCE)
        except Empty:
            if seen == at and not is_told:
                where = (
                    f"device {d} at {row[i]}"
                    for d, (i, row) in enumerate(zip(at, program.rows, strict=True))
                    if i < len(row)
                )
                watchdog.told(", ".join(where))
                is_told = True
            seen = list(at)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _dismiss(jobs: list[SimpleQueue[Job | None]]) -> None:
    for queue in jobs:
        queue.put(None)


def _job(
    code: Code, frame: Frame, device: int, ambience: Ambience, done: SimpleQueue[Failure | None], at: list[int]
) -> Job:
    """`at[device]` is kept where the device is."""

    def job() -> None:
        failure, index = None, -1
        try:
            with ExitStack() as stack:
                ambience.enter(stack)
                stack.enter_context(contained())
                for run in code.rows[device]:
                    index += 1
                    at[device] = index
                    run(frame)
                at[device] = index + 1
        except Aborted:
            pass
        except BaseException as error:
            failure = Failure(device, index, error)
            failure.__cause__ = error
            _abort(frame)
        done.put(failure)

    return job


def _abort(frame: Frame) -> None:
    """Wake everybody who waits for a value that will not come."""
    for box in frame.boxes:
        box.put(ABORT)


def choose(cell_seconds: float, devices: tuple[torch.device, ...]) -> str:
    """Threads when a cell takes longer than handing it to a thread costs, and cores would else be idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    idle = cores > torch.get_num_threads() and all(device.type == "cpu" for device in devices)
    return "threads" if idle and len(devices) > 1 and cell_seconds > WORTH_A_THREAD else "inline"


WORTH_A_THREAD = 300e-6
"""Seconds. Handing a cell to another thread costs 130 to 150 us (docs/architecture.md)."""


class Dispatcher:
    """Who runs the programs of one pipeline. "auto" begins inline and settles when the time of a cell is known."""

    def __init__(self, choice: str, devices: tuple[torch.device, ...]) -> None:
        self.choice, self.devices = choice, devices
        self._crew: Crew | None = None
        self._is_warm = False

    @property
    def threaded(self) -> bool:
        return self.choice == "threads" and len(self.devices) > 1

    @property
    def crew(self) -> Crew | None:
        """The threads, made when first asked for; None for this thread."""
        if self.threaded and self._crew is None:
            self._crew = Crew(self.devices)
        return self._crew if self.threaded else None

    def settle(self, spans: Spans) -> None:
        """After a step. The first one warms up and does not count."""
        if self.choice == "auto" and self._is_warm:
            seconds = sorted(end - start for _, _, start, end in spans)
            self.choice = choose(seconds[len(seconds) // 2], self.devices)
        self._is_warm = True
