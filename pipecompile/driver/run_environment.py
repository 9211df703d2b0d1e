"""Facts for a report about the place where a step ran: versions, threads, cores, names of the devices, samples per second."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

import torch

__all__ = ["environment_facts", "throughput"]


def environment_facts(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of versions, of threads and cores of the CPU, and of the distinct devices of a pipeline."""
    yield "torch", str(torch.__version__)
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "threads of torch", f"{torch.get_num_threads()} on {cores} core{'s' * (cores != 1)}"
    for name in dict.fromkeys(devices):
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.is_available():
            yield name, torch.cuda.get_device_name(device)


def throughput(samples: int | None, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield the samples per second of a measured step, if the mini-batch has a batch dimension and the step took time."""
    if samples and seconds:
        yield "samples per second, measured", f"{samples / seconds:.4g} ({samples} in a step)"
