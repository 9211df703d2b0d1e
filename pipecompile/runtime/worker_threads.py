"""A persistent thread per device, which runs the device's row of a program.

caller     run ──► jobs ······································ all done ──► next step
worker 0        └► 0F0 SEND 0F1 ... │ idle
worker 1        └► RECV ... 1F0 ... │ idle
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from pipecompile.ir import Program
from pipecompile.runtime import watchdog
from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.runtime.transport import ABORT, Aborted
from pipecompile.tracing.ambient_modes import contained

__all__ = ["ThreadState", "WorkerThreads"]


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Thread-local state of the caller that workers adopt: grad and inference mode, autocast, number of intra-op threads, CUDA streams."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    threads: int
    streams: tuple[Any, ...]

    @classmethod
    def of_caller(cls, n_workers: int, devices: tuple[torch.device, ...]) -> ThreadState:
        """Return the state of this thread; intra-op threads are shared out among the workers."""
        gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        kinds = ("cpu", "cuda") if gpus else ("cpu",)
        autocast = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        threads = max(1, torch.get_num_threads() // n_workers)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(*modes, autocast, threads, tuple(map(torch.cuda.current_stream, gpus)))

    def enter(self, stack: ExitStack) -> None:
        """Adopt the state in this thread until `stack` closes; streams and the number of threads stay."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype, enabled in self.autocast:
            if enabled != torch.is_autocast_enabled(kind) or enabled:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        for stream in self.streams:
            torch.cuda.set_stream(stream)


Job = Callable[[], None]


class WorkerThreads:
    """The threads of one pipeline. They wait between steps, and end when this object is collected."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self.jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in devices]
        for index, queue in enumerate(self.jobs):
            Thread(target=_work, args=(queue,), name=f"pipecompile-{index}", daemon=True).start()
        weakref.finalize(self, _end, self.jobs)

    def run(self, code: Code, frame: Frame) -> None:
        """Run each device's row, and return when all threads are idle again. Raise the first InstructionFailure."""
        state = ThreadState.of_caller(len(self.jobs), self.devices)
        done: SimpleQueue[InstructionFailure | None] = SimpleQueue()
        positions = [0] * len(self.jobs)
        for device, queue in enumerate(self.jobs):
            queue.put(_row_job(code, frame, device, state, done, positions))
        failures: list[InstructionFailure | None] = []
        try:
            while len(failures) < len(self.jobs):
                failures.append(_next_done(done, positions, code.program))
        except BaseException:  # Ctrl-C: leave with all threads idle
            _abort(frame)
            while len(failures) < len(self.jobs):
                failures.append(done.get())
            raise
        for failure in failures:
            if failure is not None:
                raise failure


def _next_done(
    done: SimpleQueue[InstructionFailure | None], positions: list[int], program: Program
) -> InstructionFailure | None:
    """Wait for the next device to end its row. Warn once, with each device's instruction, if no device advances for PATIENCE seconds."""
    seen, is_warned = list(positions), False
    while True:
        try:
            return done.get(timeout=watchdog.PATIENCE)
        except Empty:
            if seen == positions and not is_warned:
                where = (
                    f"device {d} at {row[i]}"
                    for d, (i, row) in enumerate(zip(positions, program.rows, strict=True))
                    if i < len(row)
                )
                watchdog.warn_stalled(", ".join(where))
                is_warned = True
            seen = list(positions)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(jobs: list[SimpleQueue[Job | None]]) -> None:
    for queue in jobs:
        queue.put(None)


def _row_job(
    code: Code,
    frame: Frame,
    device: int,
    state: ThreadState,
    done: SimpleQueue[InstructionFailure | None],
    positions: list[int],
) -> Job:
    """Return the job that runs a device's row, keeps `positions[device]` up to date, and puts a failure or None into `done`."""

    def job() -> None:
        failure, index = None, -1
        try:
            with ExitStack() as stack:
                state.enter(stack)
                stack.enter_context(contained())
                for run in code.rows[device]:
                    index += 1
                    positions[device] = index
                    run(frame)
                positions[device] = index + 1
        except Aborted:
            pass
        except BaseException as error:
            failure = InstructionFailure(device, index, error)
            failure.__cause__ = error
            _abort(frame)
        done.put(failure)

    return job


def _abort(frame: Frame) -> None:
    """Wake all devices that wait for a value."""
    for channel in frame.channels:
        channel.put(ABORT)
