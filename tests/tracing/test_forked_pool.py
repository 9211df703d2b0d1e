from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread

import pytest
import torch

from pipecompile.tracing import forked_pool
from pipecompile.tracing.forked_pool import renew_pool

_FORKS = """
import os, torch
import pipecompile as pc

linear, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
pc.trace  # imported before the forks
torch.set_num_threads(64)
torch.get_num_threads()  # so torch itself does not renew its pool in a child
for _ in range(3):
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        pc.trace(linear, x)
        linear(x).sum().backward()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_records_and_trains_where_torch_alone_aborts() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout.split(), done.stderr) == (["0"] * 3, "")


def test_the_pool_is_asked_for_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Thread] = []
    monkeypatch.setattr(forked_pool, "_renewed_in", [0])
    monkeypatch.setattr(forked_pool, "Thread", lambda **given: started.append(Thread(**given)) or started[-1])
    threads = torch.get_num_threads()
    renew_pool()
    renew_pool()
    assert (len(started), torch.get_num_threads()) == (1, threads)
