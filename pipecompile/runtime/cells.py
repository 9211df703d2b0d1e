"""The forward and the backward of one cell, a stage on a micro-batch, each a cut of its own in the autograd graph.

      received ──detach──► leaf ─► stage ─► out ──► sent              forward
                            │                ▲
          sent ◄── leaf.grad┘                └── gradients, summed    backward: autograd.backward(out, gradient)

Parameters get their gradients as in any backward. What lies between forward and backward, the leaves and the outputs
with their autograd graph, is one value of the program, `@stage#microbatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from pipecompile.runtime.frame import Frame

__all__ = ["Run", "backward_cell", "forward_cell"]

Run = Callable[[Frame], None]


def forward_cell(
    stage: Callable[..., Sequence[Any]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    saved: int | None,
    size_of: int | None,
) -> Run:
    """Run the stage on registers `inputs` into registers `outputs`; `saved` keeps what the backward needs.

    Without `saved` (inference) nothing is detached. `size_of` is the micro-batch whose size the stage takes, if it does.
    """

    def forward(frame: Frame) -> None:
        registers = frame.registers
        leaves = []
        for index in inputs:
            leaf = registers[index]
            if saved is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf = leaf.detach().requires_grad_()
            leaves.append(leaf)
        made = stage(*leaves) if size_of is None else stage(*leaves, frame.sizes[size_of])
        for index, value in zip(outputs, made, strict=True):
            registers[index] = value
        if saved is not None:
            registers[saved] = (leaves, made)

    return forward


def backward_cell(saved: int, gradients: Sequence[tuple[int, Sequence[int]]], sent: Sequence[tuple[int, int]]) -> Run:
    """`gradients`: (output, registers of its gradients, the last consumer's first); `sent`: (register, leaf).

    Gradients of one output are summed in the order that eager autograd would: the last use first. The engine is called
    as `torch.autograd.backward` calls it, less its checks of shapes and dtypes, which the engine makes again: on a small
    cell they cost as much as the backward itself (benchmarks/overhead.py).
    """

    def backward(frame: Frame) -> None:
        registers = frame.registers
        leaves, made = registers[saved]
        roots, given = [], []
        for output, indices in gradients:
            root = made[output]
            if root.requires_grad and (gradient := _sum(registers, indices)) is not None:
                roots.append(root)
                given.append(gradient)
        if roots:
            _engine_run_backward(
                tuple(roots), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        for index, position in sent:
            leaf = leaves[position]
            registers[index] = leaf.grad if isinstance(leaf, torch.Tensor) and leaf.is_leaf else None

    return backward


def _sum(registers: list[Any], indices: Sequence[int]) -> torch.Tensor | None:
    total = None
    for index in indices:
        gradient = registers[index]
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
