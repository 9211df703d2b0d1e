"""What a pipeline tells its user once: that the model was recorded anew, that a batch was cut otherwise than asked for."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from pipecompile.driver.specialization import Build
from pipecompile.errors import RecordingWarning
from pipecompile.ir import Kind
from pipecompile.options import Options
from pipecompile.runtime.cuda_graphs import capture as tapes
from pipecompile.tracing.fakes.batch_symbol import Guard

__all__ = ["Notices"]


class Notices:
    """One warning for each line of the user's that branches on the batch size, and one for a cache that is too small."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._gone: deque[tuple[Any, ...]] = deque(maxlen=64)

    def anew(self, mark: tuple[Any, ...], known: Sequence[Build], parts: tuple[int, ...], limit: int) -> None:
        """The model is about to be recorded for micro-batches `parts`, although `known` are recordings of such calls."""
        if known and (guard := known[-1].broken(parts[:1])):
            self._tell(
                "anew", guard, f"recorded anew for micro-batches of {parts[0]} samples; this is kept, and told once"
            )
        elif mark in self._gone and ("small", "") not in self._told:
            self._told.add(("small", ""))
            text = f"inputs of more kinds than the {limit} recordings that are kept: some are recorded again and again"
            _warn(f"{text}. Try compile(..., cache_size={2 * limit}); pipe.explain() shows what differs")

    def uneven(self, guard: Guard, wanted: tuple[int, ...], parts: tuple[int, ...]) -> None:
        """A batch goes into other micro-batches than wanted, since these are on both sides of a guard."""
        few = "one micro-batch" if len(parts) == 1 else f"{len(parts)} micro-batches"
        both = " and ".join(map(str, sorted(set(wanted))))
        self._tell("uneven", guard, f"{sum(wanted)} samples go into {few} instead of {len(wanted)}, of {both} samples")

    def unequal(self, samples: int, wanted: int, count: int) -> None:
        """Lists with an entry per sample go into fewer micro-batches, so that all are equally long."""
        if count < wanted and ("unequal", "") not in self._told:
            self._told.add(("unequal", ""))
            few = "one micro-batch" if count == 1 else f"{count} micro-batches"
            _warn(f"lists of {samples} samples go into {few} instead of {wanted}, so that all have equally many")

    def mixed(self, places: Sequence[str]) -> None:
        """Samples meet at these lines."""
        if places and ("mixed", "") not in self._told:
            self._told.add(("mixed", ""))
            text = f"every sample of a batch meets every other at {places[0]}; in micro-batches, only those of its own"
            _warn(f'{text}. If dimension 0 is not the batch, say so: compile(..., batch_dims={{"name": 1}})')

    def normalised(self, layers: int) -> None:
        """So many BatchNorm layers update their running statistics at every micro-batch, and nobody said that they should."""
        if layers and ("normalised", "") not in self._told:
            self._told.add(("normalised", ""))
            some = "a BatchNorm layer updates its" if layers == 1 else f"{layers} BatchNorm layers update their"
            text = f"{some} running statistics once a micro-batch, which moves them further than a mini-batch would"
            _warn(
                f"{text}. Try compile(..., batch_norm='deferred'), once a step; batch_norm='each' is this, and says nothing"
            )

    def undivided(self, options: Options) -> None:
        """The schedule may split backwards of stages that are compiled, or CUDA graphs."""
        whole = "compiled stage" if options.compile_stages else "CUDA graph" if options.cuda_graphs else ""
        if whole and Kind.INPUT_GRAD in options.kinds and ("undivided", "") not in self._told:
            self._told.add(("undivided", ""))
            text = f"the schedule splits backwards, and a {whole} computes all its gradients at once: all in I, W does nothing"
            _warn(
                f"{text}. Try schedule='1f1b', or {'compile_stages' if options.compile_stages else 'cuda_graphs'}=False"
            )

    def ungraphed(self, options: Options) -> None:
        """CUDA graphs are wanted where there is none."""
        kinds = {device.type for device in options.devices if tapes.tapes_on(device) is None}
        if options.cuda_graphs and kinds:
            _warn(
                f"cuda_graphs=True: there are no graphs on {' and '.join(sorted(kinds))}, whose stages run as they are"
            )

    def evicted(self, mark: tuple[Any, ...]) -> None:
        """A recording was dropped to make room."""
        self._gone.append(mark)

    def _tell(self, kind: str, guard: Guard, consequence: str) -> None:
        key = kind, guard.place or str(guard)
        if key not in self._told:
            self._told.add(key)
            where = f" at {guard.place}" if guard.place else ""
            _warn(f"the model branches on the batch size{where} ({guard}): {consequence}")


def _warn(message: str) -> None:
    warnings.warn(message, RecordingWarning, stacklevel=2)
