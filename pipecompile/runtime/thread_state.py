"""State by which the thread of a stage shows: attributes of a `threading.local`, which each thread has for itself, and settings of
kernels for a part of a forward, which all threads share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from pipecompile.errors import RecordingWarning
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.torch_private.kernel_settings import kernel_settings, set_kernel_settings
from pipecompile.tracing.user_source import warn

__all__ = ["StagesInThreads"]


class StagesInThreads:
    """The stages of a program, and by what their threads show."""

    def __init__(self, cells: Sequence[Cell | VariantCell]) -> None:
        self._cells = cells

    def __bool__(self) -> bool:
        return self._sets_kernels or bool(self._readers)

    @cached_property
    def _sets_kernels(self) -> bool:
        return any(one.sets_kernels for cell in self._cells for one in cell.all_effects)

    @cached_property
    def _readers(self) -> list[str]:
        """The names of the loss, hooks and pieces kept whole that have a `threading.local` near them."""
        holders = [one for cell in self._cells for each in cell.all_effects for one in each.state_holders.of_threads]
        return list(dict.fromkeys(getattr(one, "__qualname__", type(one).__qualname__) for one in holders))

    @contextmanager
    def kernels_restored(self) -> Iterator[None]:
        """Restore the settings of kernels after threads: each thread takes the settings of another thread for the outer ones."""
        if not self._sets_kernels:
            yield
            return
        before = kernel_settings()
        try:
            yield
        finally:
            set_kernel_settings(before)

    def warn(self) -> None:
        """Warn of what shows when each device has a thread."""
        if self._readers:
            warn(
                f"{', '.join(self._readers)} reads a threading.local, and each device's thread has its own attributes of it,"
                " which are not those that this thread has set. Try dispatch='inline', or a contextvars.ContextVar",
                RecordingWarning,
            )
        if self._sets_kernels:
            warn(
                "the model sets kernels for a part of its forward (sdpa_kernel, flags of a backend), which all threads of the process share:"
                " stages that run meanwhile may use them too. Try dispatch='inline'",
                RecordingWarning,
            )
