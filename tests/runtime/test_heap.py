"""The heap is set up once, by compile on CPUs, unless the user has set it up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading, torch
from torch import nn
import pipecompile as pc
from pipecompile.runtime.heap import keep_freed_memory

def faults(model, x, out):
    torch.set_num_threads(1)
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        model(x).sum().backward()
        out.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

torch.set_num_threads(1)
pc.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
# as in a pipeline: gradients of weights larger than a thread's heap together are made, added and freed
model, found = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)]), []
thread = threading.Thread(target=faults, args=(model, torch.randn(2, 2048), found))
thread.start(), thread.join()
print(keep_freed_memory(), found[-1])
"""


def told(**environment: str) -> tuple[bool, int]:
    """Whether it is set up, and the page faults of a warm backward in a thread."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    is_set, faults = done.stdout.split()
    return is_set == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_a_warm_backward_in_a_thread_faults_no_pages_in() -> None:
    is_set, faults = told()
    assert is_set
    assert faults < 100


def test_the_users_setting_is_left_alone() -> None:
    assert not told(MALLOC_ARENA_MAX="4")[0]
