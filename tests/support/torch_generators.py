"""What the generators of the installed torch.distributed.pipelining give, without a process group."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Order = dict[int, list[Any]]

WAITS = ("WAIT_REDUCE_GRAD", "WAIT_SEND_F") if hasattr(torch_schedules, "_add_wait_send") else ()
"""Operations that torch lowers to since 2.15."""


def single_order(cls_name: str, n_stages: int, n_microbatches: int) -> Order:
    """The order of a schedule with one stage per rank."""
    schedule = object.__new__(getattr(torch_schedules, cls_name))
    schedule._num_stages, schedule._n_microbatches = n_stages, n_microbatches
    return dict(schedule._get_pipeline_order())


def multi_order(cls_name: str, n_devices: int, chunks: int, n_microbatches: int) -> Order:
    """The order of a schedule with several stages per rank."""
    schedule = _bare(cls_name, n_devices, chunks, n_microbatches)
    order: Order = {}
    for rank in range(n_devices):
        schedule.rank = rank
        order[rank] = schedule._calculate_single_rank_operations(rank)
    return order


def with_communication(order: Order, placement: tuple[int, ...], n_microbatches: int) -> Order:
    """As torch lowers it for FSDP stages: UNSHARD, RESHARD, sends, receives, waits, reductions."""
    lowered = {rank: torch_schedules._add_unshard_reshard(list(row)) for rank, row in order.items()}
    lowered = {rank: torch_schedules._add_reduce_grad(row, n_microbatches) for rank, row in lowered.items()}
    lowered = torch_schedules._add_send_recv(lowered, placement.__getitem__, len(placement))
    return dict(torch_schedules._add_wait_send(lowered) if WAITS else lowered)


def written(order: Order) -> str:
    """The CSV that `_dump_csv` writes."""
    text = io.StringIO()
    writer = csv.writer(text)
    for rank in sorted(order):
        writer.writerow(order[rank])
    return text.getvalue()


def loaded(path: Path, placement: tuple[int, ...], n_devices: int, n_microbatches: int) -> tuple[Order, Order]:
    """Read by torch's own loader, which validates it and adds communication: the order before that, and after."""
    schedule = _bare("_PipelineScheduleRuntime", n_devices, len(placement) // n_devices, n_microbatches)
    schedule.pipeline_order = {}
    schedule._unshard_lookahead, schedule._max_active_stages = "full", 3
    schedule._defer_reduce_grad_wait = schedule._defer_pp_recv = False
    schedule._max_outstanding_sends = None
    schedule._load_csv(str(path))
    assert tuple(schedule.stage_index_to_group_rank[stage] for stage in range(len(placement))) == placement
    return schedule.pipeline_order, schedule.pipeline_order_with_comms


def _bare(cls_name: str, n_devices: int, chunks: int, n_microbatches: int) -> Any:
    """A schedule object that has its counts and nothing else."""
    schedule = object.__new__(getattr(torch_schedules, cls_name))
    schedule.pp_group_size, schedule.n_local_stages = n_devices, chunks
    schedule._n_microbatches, schedule._stages = n_microbatches, []
    schedule._num_stages = schedule.num_stages = n_devices * chunks
    schedule.number_of_rounds = max(1, n_microbatches // n_devices)
    schedule.microbatches_per_round = n_microbatches // schedule.number_of_rounds
    if cls_name == "ScheduleLoopedBFS":
        schedule._stages = [None] * chunks
    return schedule
