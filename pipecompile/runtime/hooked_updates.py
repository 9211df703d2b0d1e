"""Hooks on gradients of which a pipeline differs from a loop over micro-batches.

Hooks that change parameters within a step, as an optimizer in the backward does: a loop runs the forward of the next micro-batch on the
changed parameters. A schedule with several micro-batches in flight has run it before, on the old ones.

Hooks and backwards of `torch.autograd.Function` that write a buffer which the forward reads: the same.

`register_multi_grad_hook`: a loop calls the function once per backward. The stages each run a backward of their own. Where hooks are held
(`held_hooks.py`) the function runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pipecompile.errors import RecordingWarning
from pipecompile.ir import Kind, Program
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.torch_private.autograd_engine import (
    gradient_hook_tables,
    has_joint_hook,
    hooks_registered,
    is_accumulation_watched,
)
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.user_source import warn

__all__ = ["ADVICE", "Before", "HookedUpdates", "is_loop", "read_state"]

_SAMPLED = 64
"""Elements of a parameter that are compared: an update changes nearly all."""

ADVICE = (
    "hooks on gradients change parameters during the step, while micro-batches are in flight",
    "n_microbatches=1, or change the parameters after the step",
)
"""Why a backward may find that a tensor was changed, and what to try."""

_ADVICE_ON_STATE = "n_microbatches=1, or write it after the step"

Sample = tuple[torch.Tensor, torch.Tensor]
"""A parameter and some of its elements."""


@dataclass(frozen=True, slots=True)
class Before:
    """State before a run: the parameters that have hooks, those of them with hooks on the node that adds to `.grad`; and to compare
    with, their elements and how often each tensor was written.
    """

    hooked: Sequence[torch.Tensor] = ()
    watched: Sequence[torch.Tensor] = ()
    samples: Sequence[Sample] = ()
    versions: Sequence[int] = ()


def is_loop(program: Program) -> bool:
    """Return whether each stage runs the backward of a micro-batch before the forward of the next, as a loop does. Copies of a stage
    have micro-batches in flight beside each other.
    """
    if program.directions:
        return False
    open_stages: set[int] = set()
    ends = {Kind.BACKWARD, Kind.WEIGHT_GRAD}
    for action in (one.action for row in program.rows for one in row if one.action is not None):
        if action.kind is Kind.FORWARD and action.stage in open_stages:
            return False
        open_stages = open_stages | {action.stage} if action.kind is Kind.FORWARD else open_stages
        open_stages = open_stages - {action.stage} if action.kind in ends else open_stages
    return True


def read_state(cells: Iterable[Cell | VariantCell]) -> dict[str, torch.Tensor]:
    """Return the buffers that stages read, and the frozen parameters, but for those that their forwards may write, by name."""
    cells = tuple(cells)
    written = {id(one) for cell in cells for effects in cell.all_effects for one in effects.written_buffers}
    modules = [module for cell in cells for module in cell.modules]
    named = (pair for module in modules for pair in (*module.named_buffers(), *module.named_parameters()))
    state = ((name, tensor) for name, tensor in named if not tensor.requires_grad and id(tensor) not in written)
    return {name.removeprefix("_of_model."): tensor for name, tensor in state}


class HookedUpdates:
    """Notices, with one warning each, that a parameter with hooks or other state changes during a run, and hooks on several gradients
    at once.

    `state` has the tensors that forwards read and do not write, by name. `holds`: hooks on several gradients are held until all are there.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        program: Program,
        state: Mapping[str, torch.Tensor],
        *,
        holds: bool = False,
    ) -> None:
        self._parameters = tuple(parameters)
        self._is_warned = is_loop(program)
        self._names, self._state = ((), ()) if self._is_warned else (tuple(state), tuple(state.values()))
        self._is_divided = program.n_stages > 1 and not holds
        self._hook_count, self._watched = -1, tuple[torch.Tensor, ...]()

    @property
    def has_hooks(self) -> bool:
        """Whether a parameter has hooks on its gradient now."""
        return bool(self._watched) or any(map(gradient_hook_tables, self._parameters))

    def before(self) -> Before:
        """Return what to compare after a run. Warn of hooks on several gradients, if there are several stages."""
        watched = self._on_nodes()
        hooked = [one for one in self._parameters if gradient_hook_tables(one)]
        if hooked and self._is_divided and any(map(has_joint_hook, hooked)):
            self._is_divided = False
            warn(
                "a function of register_multi_grad_hook runs once per stage and micro-batch, with None for the parameters of"
                " other stages, unlike in a loop over micro-batches. Try to read .grad after the step",
                RecordingWarning,
            )
        samples = [] if self._is_warned else [(one, _elements(one)) for one in dict.fromkeys((*hooked, *watched))]
        return Before(hooked, watched, samples, [*map(version_of, self._state)])

    def _on_nodes(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters that may have hooks on the node that adds to `.grad`. They are looked for when hooks were registered."""
        if hooks_registered() != self._hook_count:
            trained = (one for one in self._parameters if one.requires_grad and not has_joint_hook(one))
            self._watched = tuple(one for one in trained if is_accumulation_watched(one))
        return self._watched

    def note_hooks(self) -> None:
        """Assume that the hooks registered during a run are not on nodes. An exception of a hook has the node, and is not asked."""
        self._hook_count = hooks_registered()

    def check(self, before: Before) -> None:
        """Warn if a parameter or other state has changed since."""
        self.note_hooks()
        if not all(torch.equal(_elements(parameter), sample) for parameter, sample in before.samples):
            self._is_warned = True
            warn(
                f"{ADVICE[0]}: a micro-batch whose forward had run before the change used the old values, unlike in a loop over"
                f" micro-batches. Try {ADVICE[1]}",
                RecordingWarning,
            )
        elif self._state and before.versions != [*map(version_of, self._state)]:
            self._check_state(before.versions)

    def _check_state(self, versions: Sequence[int]) -> None:
        changed = zip(self._names, self._state, versions, strict=True)
        name = next(name for name, tensor, version in changed if version_of(tensor) != version)
        self._names, self._state = (), ()
        warn(
            f"{name}, which the forward reads, was written during the step, by a hook or a backward: a micro-batch whose forward"
            f" had run before the write read the old values, unlike in a loop over micro-batches. Try {_ADVICE_ON_STATE}",
            RecordingWarning,
        )


def _elements(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()
