"""Facts for a report about the place where a step ran: versions, threads, cores, names of the devices, samples per second.

The report also shows the lines that make it again.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence

import torch

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.torch_private.accelerators import accelerator_type, device_name, is_accelerator

__all__ = ["environment_facts", "lines_again", "throughput"]


def environment_facts(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of versions, of threads and cores of the CPU, and of the distinct devices of a pipeline."""
    yield "torch", str(torch.__version__)
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "threads of torch", f"{torch.get_num_threads()} on {cores} core{'s' * (cores != 1)}"
    for name in dict.fromkeys(devices):
        device = torch.device(name)
        if is_accelerator(device) and device.type == accelerator_type():
            yield name, device_name(device)


def throughput(samples: int | None, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield the samples per second of a measured step, if the mini-batch has a batch dimension and the step took time."""
    if samples and seconds:
        yield "samples per second, measured", f"{samples / seconds:.4g} ({samples} in a step)"


def lines_again(devices: Sequence[str], schedule: Schedule, *, has_run: bool) -> str:
    """Return the command of this process, unless it is interactive, and lines of Python that make the report again.

    The lines repeat the cut from a saved plan, and the order of actions by its name or from a saved schedule. Files are written by
    the first line.
    """
    names = [*dict.fromkeys(devices)]
    written = f'["{names[0]}"] * {len(devices)}' if len(names) == 1 else str([*devices]).replace("'", '"')
    options = f'devices={written}, n_microbatches={schedule.n_microbatches}, schedule="{_name_or_file(schedule)}", plan="plan.json"'
    return "\n".join([
        *_command(),
        'pipe.dump(".")  # writes plan.json and schedule.csv',
        f"pipe = pc.compile(model, {schedule.n_stages}, {options}, example_args=..., loss_fn=...)",
        *(["pipe.step(x, target=y)  # for the measured times"] if has_run else []),
        'pipe.report("report.html")',
    ])  # fmt: skip


def _name_or_file(schedule: Schedule) -> str:
    """Return the name of the schedule if the catalogue makes the same order of actions under it, else the file."""
    entry = schedule.name in CATALOGUE
    try:
        counts = schedule.n_stages, schedule.n_microbatches
        same = entry and build_schedule(schedule.name, *counts, n_devices=schedule.n_devices).rows == schedule.rows
    except ScheduleError:
        same = False
    return schedule.name if same else "schedule.csv"


def _command() -> list[str]:
    """Return the command line of this process as a comment; nothing for a notebook, a prompt, or code on the command line."""
    words = sys.orig_argv[1:]
    if not words or "-c" in words or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return []
    return [f"# {shlex.join(['python', *words])}"]
