"""Pipelines of other frameworks: read, checked, repaired and written back; open order_reader.py first.

    torch.distributed.pipelining     CSV, compute-only or with communication     torch_csv.py
    Megatron-LM                      layout strings: Et*3|(tt|)*29m|L             megatron_layout.py
    DeepSpeed                        schedules by name: TrainSchedule             deepspeed_schedule.py
    sail-sg's zero bubble            lists of ScheduledNode(...)                  zero_bubble_nodes.py

Each becomes a `PipelineOrder`: per rank the cells in the order of the file, communication included.
"""

from __future__ import annotations

from pipecompile.interchange.order_reader import read_schedule
from pipecompile.interchange.order_report import OrderReport, check_order
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder
from pipecompile.interchange.reordering import repair_order

__all__ = ["OrderCell", "OrderReport", "PipelineOrder", "check_order", "read_schedule", "repair_order"]
