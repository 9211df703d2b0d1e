"""Code of a program for one stream: all instructions in one legal order, without copies, events or times of cells.

    0F0  1F0  0F1  1F1  1B0  0B0 ...     what a CUDA graph of the whole step is captured from

Each forward notes the leaves of its autograd graph: the tensors to whose `.grad` the backward adds. Those of the loss are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipecompile.graph.backward_split import explore_backward
from pipecompile.ir import Action, Program, saved
from pipecompile.ir.execution_order import frees_after, merged
from pipecompile.runtime.cells.forward_backward import SavedGraph
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.gpu_spans import on_gpu
from pipecompile.runtime.interpreter import Code, CodeBuilder
from pipecompile.runtime.profiler_ranges import in_range
from pipecompile.runtime.registers import CellRegisters, Frame, Run
from pipecompile.runtime.transport import then_free
from pipecompile.torch_private.accelerators import is_accelerator

__all__ = ["StepCode"]


class StepCode:
    """The code of a program on one device; `leaves` are those that forwards found since the last `clear`, by id."""

    def __init__(self, program: Program, cells: Sequence[Cell], devices: Sequence[torch.device]) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        builder = _StepBuilder(program, cells, devices, self.leaves)
        rows = tuple(tuple(builder.run(instruction, d) for instruction in row) for d, row in enumerate(program.rows))
        freed = frees_after(program, merged(program))
        flat = tuple(then_free(rows[d][i], [builder.register(o, d) for o in frees]) for (d, i), frees in freed.items())
        n_registers, n_channels = len(builder.registers), len(builder.channels)
        self.code = Code(program, rows, tuple(freed), flat, n_registers, n_channels, threaded=False, streams=None)

    def new_frame(self, frame: Frame) -> Frame:
        """Return an empty frame for micro-batches of the sizes of another, with places for what departs."""
        departures: dict[tuple[str, bool], list[Any]] = {
            key: [{} if isinstance(part, dict) else None for part in parts] for key, parts in frame.departures.items()
        }
        registers, channels = [None] * self.code.n_registers, [None] * self.code.n_channels
        return Frame([*registers], [*channels], frame.sizes, departures=departures)


class _StepBuilder(CodeBuilder):
    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell],
        devices: Sequence[torch.device],
        leaves: dict[int, torch.Tensor],
    ) -> None:
        super().__init__(program, cells, devices)
        self.leaves = leaves

    def timed(self, run: Run, device: int, name: str) -> Run:
        run = in_range(run, name)  # a graph has no times of its cells
        return on_gpu(run, self.devices[device]) if is_accelerator(self.devices[device]) else run

    def forward(self, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        run, kept = super().forward(action, registers, device), saved(action.stage, action.microbatch).name
        return run if kept not in registers.writes else _noting(run, registers.writes[kept], self.leaves)


def _noting(run: Run, kept: int, leaves: dict[int, torch.Tensor]) -> Run:
    """Return the function of an F or an R that notes the leaves of the graph which it keeps in the register `kept`."""

    def forward(frame: Frame) -> None:
        run(frame)
        graph: SavedGraph = frame.registers[kept]
        own = {id(leaf) for leaf in graph.leaves if leaf is not None}
        nodes, _ = explore_backward([edge for edge in graph.edges if edge is not None], frozenset())
        found = (getattr(node, "variable", None) for node in nodes)
        leaves.update((id(leaf), leaf) for leaf in found if leaf is not None and id(leaf) not in own)

    return forward
