"""A repaired order has the same computations, runs under every rule, and is run by torch on ranks of gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_orders import drawn_order, with_moved_messages
from torch_generators import WAITS, loaded

from pipecompile.errors import ScheduleError, VerifyError
from pipecompile.interchange import PipelineOrder, read_schedule
from pipecompile.interchange.order_report import check_order
from pipecompile.interchange.reordering import repair_order
from pipecompile.interchange.torch_csv import parse_torch_csv

HERE = Path(__file__).parent


def computations(order: PipelineOrder) -> list[Counter[object]]:
    return [Counter(action for cell in row for action in cell.actions) for row in order.rows]


def test_messages_that_were_moved_are_repaired_without_a_stall() -> None:
    mended = 0
    for seed in range(80):
        random = Random(seed)
        order = with_moved_messages(random, drawn_order(random, communicates=True, plain=True))
        before, repaired = check_order(order), repair_order(order)
        report = check_order(repaired)
        assert report.is_sound
        assert {verdict.outcome for verdict in report.verdicts} == {"runs"}, str(order)
        assert repaired.schedule == order.schedule
        mended += not before.is_sound
    assert mended > 5


def test_sharding_overlaps_and_idle_ticks_stay_where_they_are() -> None:
    for seed in range(80):
        order = drawn_order(Random(seed), communicates=True)
        report = check_order(order)
        if report.faults:  # cells that overlap may need each other
            continue
        repaired = repair_order(order)
        kept = [[c for c in row if not c.is_transfer and not c.op.startswith("WAIT_SEND")] for row in order.rows]
        assert kept == [
            [c for c in row if not c.is_transfer and not c.op.startswith("WAIT_SEND")] for row in repaired.rows
        ]
        assert check_order(repaired).is_sound
        assert repair_order(repaired) == repaired


def test_computations_that_cannot_run_in_their_order_change_places() -> None:
    for seed in range(60):
        random = Random(seed)
        order = drawn_order(random, communicates=False, plain=True)
        rows = [list(row) for row in order.rows]
        for row in rows:
            for _ in range(2):
                first, second = random.randrange(len(row)), random.randrange(len(row))
                row[first], row[second] = row[second], row[first]
        shuffled = replace(order, rows=tuple(map(tuple, rows)))
        repaired = repair_order(shuffled)
        assert check_order(repaired).is_sound
        assert computations(repaired) == computations(order)
        assert check_order(shuffled).faults or repaired == shuffled


def test_what_an_order_cannot_mend_is_refused() -> None:
    with pytest.raises(VerifyError, match="stage 1 never runs B"):
        repair_order(parse_torch_csv("0F0,0B0\n1F0\n"))
    with pytest.raises(ScheduleError, match="0UNSHARD cannot be kept"):
        repair_order(parse_torch_csv("0UNSHARD,0B0,0F0\n"))
    crossed = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    with pytest.raises(ScheduleError, match="no order of these cells can run"):
        repair_order(parse_torch_csv(crossed))


def test_the_loader_of_torch_reads_a_repaired_order_without_communication(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    order = repair_order(parse_torch_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    order.save(path)
    plain, _ = loaded(path, (0, 1), 2, 2)
    assert ["".join(map(str, row)) for row in plain.values()] == ["".join(map(str, row)) for row in order.rows]


@pytest.mark.skipif(not WAITS, reason="torch reads waits for sends since 2.15")
def test_torch_runs_repaired_orders_on_ranks_of_gloo(tmp_path: Path) -> None:
    """Two files that deadlock: on two ranks, and on four. The gradients are those of eager."""
    files = []
    for name in ("deferred-receives", "communicators-in-a-ring"):
        files.append(str(tmp_path / f"{name}.csv"))
        repair_order(read_schedule(HERE / "pipelines" / f"{name}.csv")).save(files[-1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))}  # fmt: skip
    command = [sys.executable, str(HERE / "torch_ranks.py"), *files]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    distances = [float(line) for line in done.stdout.split()]
    assert len(distances) == 2
    assert max(distances) < 1e-6
