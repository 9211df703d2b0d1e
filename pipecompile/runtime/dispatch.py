"""Dispatch: one thread runs the instructions of all devices in one merged order, or a thread per device runs its row.

    inline    0F0 1F0 0F1 1F1 ...         4 to 20 us a cell; faster for small cells, and when cores are busy
    threads   device 0: 0F0 0F1 ...       faster when a cell takes longer than to wake a thread, and cores are idle
              device 1:     1F0 1F1 ...

Both run the same code of the same program, so both give the same numbers, unless the order of cells shows: where stages draw random
numbers, or run user code that leaves something behind. "auto" stays inline there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter
from types import FrameType

import torch

from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame, Spans
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.runtime.watchdog import Watchdog
from pipecompile.runtime.worker_threads import WorkerThreads
from pipecompile.torch_private.modes import has_thread_modes

__all__ = ["Dispatcher", "choose_dispatch", "run_inline"]


def run_inline(code: Code, frame: Frame) -> None:
    """Run the instructions of all devices in this thread. Raise InstructionFailure."""
    position, begun = -1, perf_counter()  # noqa: F841 the watchdog reads both
    if WATCHDOG.thread is None or not WATCHDOG.thread.is_alive():  # no thread survives a fork
        WATCHDOG.start()
    try:
        for position, run in enumerate(code.flat):  # noqa: B007 read when one raises
            run(frame)
    except BaseException as error:
        raise InstructionFailure(*code.order[position], error) from error


def _position(call: FrameType) -> tuple[object, str]:
    """Return a key of this call of `run_inline`, and a phrase for the instruction that it is at."""
    variables = call.f_locals
    code, position = variables["code"], max(variables.get("position", 0), 0)
    device, index = code.order[position]
    return (id(code), variables.get("begun")), f"device {device} at {code.program.rows[device][index]}"


WATCHDOG = Watchdog(run_inline.__code__, _position)


def choose_dispatch(cell_seconds: float, devices: tuple[torch.device, ...]) -> str:
    """Return "threads" if a cell takes longer than its hand-over to a thread and cores are idle, else "inline"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_idle = cores > torch.get_num_threads() and all(device.type == "cpu" for device in devices)
    return "threads" if is_idle and len(devices) > 1 and cell_seconds > THREAD_SECONDS else "inline"


THREAD_SECONDS = 300e-6
"""Seconds of a cell from which on threads are chosen: handing a cell to a thread costs 130 to 150 us (docs/architecture.md)."""


@dataclass(eq=False)
class Dispatcher:
    """Choice of threads for the programs of one pipeline. "auto" runs inline until the seconds of a cell are measured."""

    choice: str
    devices: tuple[torch.device, ...]
    _workers: WorkerThreads | None = None
    _is_warm: bool = False

    def __post_init__(self) -> None:
        self._is_automatic = self.choice == "auto"

    def is_threaded(self, *, is_ordered: bool) -> bool:
        """Return whether each device has a thread for a program, `is_ordered` if the order of its cells shows. Modes and hooks of the
        caller's thread would not reach other threads: then none has.
        """
        if self.choice != "threads" or len(self.devices) < 2 or (is_ordered and self._is_automatic):
            return False
        return not has_thread_modes()

    def workers(self, *, threaded: bool) -> WorkerThreads | None:
        """Return the threads, started at the first use; None to run in the caller's thread."""
        if threaded and (self._workers is None or self._workers.process != os.getpid()):
            self._workers = WorkerThreads(self.devices)  # no thread survives a fork
        return self._workers if threaded else None

    def settle(self, spans: Spans, *, is_ordered: bool) -> None:
        """Choose by the median cell of a step. The first step warms up and does not count."""
        if self.choice == "auto" and (is_ordered or any(device.type != "cpu" for device in self.devices)):
            self.choice = "inline"  # on GPUs launching does not wait, and cells are measured by the GPU
        elif self.choice == "auto" and self._is_warm:
            seconds = sorted(end - start for _, _, start, end in spans)
            self.choice = choose_dispatch(seconds[len(seconds) // 2], self.devices)
        self._is_warm = True
