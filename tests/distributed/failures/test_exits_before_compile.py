"""A rank whose script ends before it has made a pipeline is named with its error, long before the timeout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from pipecompile.distributed.failures import exits_before_compile
from pipecompile.distributed.failures.exits_before_compile import early_end
from tests.support.warm_python import ROOT

SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
import pipecompile as pc
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
pc.compile(nn.Linear(4, 4), 2, n_microbatches=2 * (1 - rank)).prepare(torch.zeros(4, 4))
"""


def test_without_a_process_group_nothing_is_known() -> None:
    exits_before_compile._note()
    assert early_end(0) == ""


@pytest.mark.usefixtures("single_rank")
def test_the_end_of_a_script_is_noted_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert early_end(0) == ""
    monkeypatch.setattr(sys, "last_value", ValueError("no data"), raising=False)
    monkeypatch.setattr(exits_before_compile, "_IS_CHILD", [True])
    exits_before_compile._note()
    assert early_end(0) == ""
    monkeypatch.setattr(exits_before_compile, "_IS_CHILD", [])
    exits_before_compile._note()
    assert early_end(0) == "its script has ended by ValueError: no data"
    assert early_end(1) == ""
    monkeypatch.setattr(sys, "last_value", None)
    exits_before_compile._note()
    assert early_end(0) == "its script has ended by ValueError: no data"  # the first note knows most


def test_processes_of_multiprocessing_leave_a_note_with_their_error(tmp_path: Path) -> None:
    """Their exceptions pass no hook of `sys`."""
    process = get_context("fork").Process(target=_end, args=(tmp_path / "note",))
    process.start()
    process.join(120)
    assert (tmp_path / "note").read_text() == "its script has ended by ValueError: no data"


def _end(note: Path) -> None:
    exits_before_compile._IS_CHILD.clear()
    exits_before_compile.dist.is_initialized = lambda: True
    exits_before_compile.dist.get_rank = lambda: 0

    class Notes:
        def compare_set(self, _rank: str, _before: str, text: str) -> None:
            note.write_text(text)

    exits_before_compile._notes = Notes
    raise ValueError("no data")


@pytest.mark.timeout(300)
def test_an_argument_that_one_rank_alone_refuses_is_told_by_the_other_before_the_timeout() -> None:
    """It said, after the timeout: "it has not called compile"."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(store.port)], env=environment, text=True, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    refused = ranks[1].communicate(timeout=200)[1]
    start = time.monotonic()
    told = ranks[0].communicate(timeout=100)[1]
    assert "n_microbatches=0 is not a whole number" in refused
    assert (
        "rank 1 failed before an exchange: its script has ended by InputError: n_microbatches=0 is not a whole" in told
    )
    assert time.monotonic() - start < 50
