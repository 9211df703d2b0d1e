"""A persistent thread per device, which runs the device's row of a program.

caller     run ──► jobs ······································ all ended ──► next step
worker 0        └► 0F0 SEND 0F1 ... │ idle
worker 1        └► RECV ... 1F0 ... │ idle
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.runtime import watchdog
from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.runtime.transport import ABORT, Aborted
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.modes import flushes_denormals
from pipecompile.tracing.ambient_modes import contained

__all__ = ["ThreadState", "WorkerThreads"]


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Thread-local state of the caller that workers adopt: grad and inference mode, autocast and its cache, number of intra-op threads,
    whether the CPU flushes denormal numbers, CUDA streams.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    threads: int
    streams: tuple[Any, ...]
    caches_casts: bool = True
    flushes_denormals: bool = False

    @classmethod
    def of_caller(cls, n_workers: int, devices: tuple[torch.device, ...]) -> ThreadState:
        """Return the state of this thread; intra-op threads are shared out among the workers."""
        gpus = [device for device in dict.fromkeys(devices) if is_accelerator(device)]
        kinds = ("cpu", *dict.fromkeys(device.type for device in gpus))
        autocast = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        threads = max(1, torch.get_num_threads() // n_workers)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        streams = tuple(map(torch.accelerator.current_stream, gpus))
        return cls(*modes, autocast, threads, streams, torch.is_autocast_cache_enabled(), flushes_denormals())

    def enter(self, stack: ExitStack) -> None:
        """Adopt the state in this thread until `stack` closes. What no context manager sets stays, until the next run sets it."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if flushes_denormals() != self.flushes_denormals:
            torch.set_flush_denormal(self.flushes_denormals)
        torch.set_autocast_cache_enabled(self.caches_casts)
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype, enabled in self.autocast:
            if enabled != torch.is_autocast_enabled(kind) or enabled:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        for stream in self.streams:
            torch.accelerator.set_stream(stream)


Job = Callable[[], None]


class WorkerThreads:
    """The threads of one pipeline, in `process`. They wait between steps, and end when this object is collected."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices, self.process = devices, os.getpid()
        self.jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in devices]
        self._latest: ThreadedRun | None = None
        self._threads = [
            Thread(target=_work, args=(queue,), name=f"pipecompile-{index}", daemon=True)
            for index, queue in enumerate(self.jobs)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self.jobs)

    def run(self, code: Code, frame: Frame) -> None:
        """Run each device's row, and return when all threads are idle again. Raise the first InstructionFailure.

        Ctrl-C stops the threads and waits for them. If it comes again meanwhile, the next run waits for them. Raise InputError in one
        of the threads: it would wait for itself.
        """
        if current_thread() in self._threads:
            why = "a loss function or a layer calls step: its thread would wait for itself"
            raise InputError("a step within a step of the same pipeline", why=why, hint='dispatch="inline"')
        self._stop()
        run = self._latest = ThreadedRun(code, frame, ThreadState.of_caller(len(self.jobs), self.devices))
        try:
            contexts = self._queue(run)
            run.wait()
        except BaseException:
            self._stop()
            raise
        finally:
            if run.has_ended:
                self._latest = None
        _adopt(contexts)
        if run.failures:
            raise run.first_failure()

    def _queue(self, run: ThreadedRun) -> list[Context]:
        """Give each thread its row. Return the contexts in which they run: copies of the caller's context."""
        contexts = [copy_context() for _ in self.jobs]
        for device, (queue, context) in enumerate(zip(self.jobs, contexts, strict=True)):
            queue.put(partial(context.run, run.run_row, device))
        return contexts

    def _stop(self) -> None:
        """Stop a run that was interrupted, and wait for its threads. Safe to interrupt and to repeat at any place."""
        if self._latest is not None and not self._latest.has_ended:
            self._latest.stop()
            self._queue(self._latest)  # a job that was queued before does nothing the second time
            self._latest.wait()


class ThreadedRun:
    """One run of a program in threads. `ended` has the devices whose rows are over; only their threads add to it.

    The caller reads the state and takes nothing out, so an interrupt at any place loses nothing.
    """

    def __init__(self, code: Code, frame: Frame, state: ThreadState) -> None:
        self.code, self.frame, self.state = code, frame, state
        self.positions = [0] * len(code.rows)
        self.failures: list[InstructionFailure] = []
        self.ended: list[int] = []
        self.is_stopped = False
        self._begun = [False] * len(code.rows)
        self._news = Event()

    @property
    def has_ended(self) -> bool:
        """Whether all threads are idle."""
        return len(self.ended) == len(self.positions)

    def stop(self) -> None:
        """Let every thread end its row after the present instruction; wake those that wait for a value."""
        self.is_stopped = True
        for channel in self.frame.channels:
            channel.put(ABORT)

    def wait(self) -> None:
        """Return when all rows are over. Warn once, with each device's instruction, if none advances for PATIENCE seconds."""
        seen, is_warned = list(self.positions), False
        while True:
            self._news.clear()
            if self.has_ended:
                return
            if self._news.wait(watchdog.PATIENCE):
                continue
            if seen == self.positions and not is_warned:
                watchdog.warn_stalled(self._places())
                is_warned = True
            seen = list(self.positions)

    def _places(self) -> str:
        places = enumerate(zip(self.positions, self.code.program.rows, strict=True))
        return ", ".join(f"device {device} at {row[i]}" for device, (i, row) in places if i < len(row))

    def run_row(self, device: int) -> None:
        """Run the row of a device in its thread, and keep its position up to date. A second call does nothing."""
        if self._begun[device]:
            return
        self._begun[device] = True
        try:
            with ExitStack() as stack:
                self.state.enter(stack)
                stack.enter_context(contained())
                self._run_instructions(device)
        except Aborted:
            pass
        except BaseException as error:
            self._note(device, error)
            self.stop()
        self.ended.append(device)
        self._news.set()

    def _note(self, device: int, error: BaseException) -> None:
        failure = InstructionFailure(device, self.positions[device], error)
        failure.__cause__ = error
        self.failures.append(failure)

    def first_failure(self) -> InstructionFailure:
        """Return the first failure, and forget all: they hold this run, by the frames of the threads."""
        first = self.failures[0]
        self.failures.clear()
        return first

    def _run_instructions(self, device: int) -> None:
        positions, frame = self.positions, self.frame
        for index, run in enumerate(self.code.rows[device]):
            if self.is_stopped:
                return
            positions[device] = index
            run(frame)
        positions[device] = len(self.code.rows[device])


def _adopt(contexts: Iterable[Context]) -> None:
    """Set the context variables of the caller that stages have set."""
    before = copy_context()
    for variable, value in (pair for context in contexts for pair in context.items()):
        if variable not in before or before[variable] is not value:
            variable.set(value)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(jobs: list[SimpleQueue[Job | None]]) -> None:
    for queue in jobs:
        queue.put(None)
