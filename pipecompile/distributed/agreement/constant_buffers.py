"""The buffers of a rank that stages read and no recording writes: scales, tables, masks, statistics of frozen layers.

copy 0, rank 1   scale   read by stage 1, written by none   ─┐
                                                             ├─► equal until a script changes one of them alone
copy 1, rank 3   scale   read by stage 1, written by none   ─┘

What a forward writes, such as running statistics in training, is of the samples of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from pipecompile.driver.specialization import Specialization
from pipecompile.runtime.cells.side_effects import SideEffects

__all__ = ["ConstantBuffers"]


class ConstantBuffers:
    """Those buffers of `model` that live here, as `is_here` says, by the recordings that `entries` returns."""

    def __init__(
        self, model: nn.Module, entries: Callable[[], Sequence[Specialization]], is_here: Callable[[torch.Tensor], bool]
    ) -> None:
        self._model, self._entries, self._is_here = model, entries, is_here
        self._seen, self._read, self._written, self._replaced = 0, set[int](), set[int](), set[object]()
        self._buffers: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Return the buffers. What an earlier recording has written counts as written, also if the recording is gone."""
        new = [entry for entry in self._entries() if entry.number > self._seen]
        if new:
            self._seen = max(entry.number for entry in new)
            for entry in new:
                self._note(entry)
            self._buffers = tuple(
                buffer for name, buffer in self._model.named_buffers() if self._is_constant(name, buffer)
            )
        return self._buffers

    def _note(self, entry: Specialization) -> None:
        for stage in entry.stages:
            effects = SideEffects.of(stage)
            self._read |= {id(buffer) for buffer in stage.module.buffers()}
            self._written |= {id(buffer) for buffer in effects.written_buffers}
            self._replaced |= {place.key for place in effects.places}

    def _is_constant(self, name: str, buffer: torch.Tensor) -> bool:
        is_read_only = id(buffer) in self._read - self._written and name.rpartition(".")[2] not in self._replaced
        return is_read_only and self._is_here(buffer)
