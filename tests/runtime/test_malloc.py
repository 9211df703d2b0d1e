"""The heap is set up once, by compile on CPUs, unless the user has set it up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc")

PROGRAM = """
import resource, threading, torch
from torch import nn
import pipecompile as pc
from pipecompile.runtime.malloc import keep_freed_memory

def faults(out):
    torch.set_num_threads(1)
    for _ in range(4):  # together more than a thread's heap holds
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        made = [torch.ones(3 << 20) for _ in range(8)]
        del made
        after = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    out.append(after - before)

pc.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
found, done = [], threading.Event()
for _ in range(3):  # the first may be given the heap of a thread that has ended
    thread = threading.Thread(target=lambda: (faults(found), ready.set(), done.wait()))
    ready = threading.Event()
    thread.start(), ready.wait()
done.set()
print(keep_freed_memory(), min(found))
"""


def told(**environment: str) -> tuple[bool, int]:
    """Whether it is set up, and how many pages a thread faults in that makes again what it made before."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    is_set, faults = done.stdout.split()
    return is_set == "True", int(faults)


def test_memory_that_was_freed_in_a_thread_is_at_hand() -> None:
    is_set, faults = told()
    assert is_set
    assert faults < 100


def test_the_users_setting_is_left_alone() -> None:
    is_set, faults = told(MALLOC_ARENA_MAX="8")
    assert not is_set
    if sys.version_info < (3, 13):  # where it faulted in no page
        assert faults > 1000
