"""Times of actions, and ranges of torch's profiler around them: `PP:2F0`, as torch.distributed.pipelining calls them.

Kineto writes them into its trace as user annotations, which HTA and Perfetto read. Worker threads are recorded
with `torch.profiler.profile(experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True))`.
"""

from __future__ import annotations

from time import perf_counter

from torch.profiler import record_function

from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.diagnostics import is_profiling

__all__ = ["in_range", "timed"]


def in_range(run: Run, action: str) -> Run:
    """Return the function of an action, which runs in a range of its name while a profiler is on."""
    name = f"PP:{action}"

    def run_in_range(frame: Frame) -> None:
        if is_profiling():
            with record_function(name):
                run(frame)
        else:
            run(frame)

    return run_in_range


def timed(run: Run, device: int, action: str) -> Run:
    """Return the function of an action of a pipeline device, which notes its start and end by the clock of the host, in a range of its
    name while a profiler is on.
    """
    name = f"PP:{action}"

    def run_timed(frame: Frame) -> None:
        start = perf_counter()
        if is_profiling():
            with record_function(name):
                run(frame)
        else:
            run(frame)
        frame.spans.append((device, action, start, perf_counter()))

    return run_timed
