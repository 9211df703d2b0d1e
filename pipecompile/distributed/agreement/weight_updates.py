"""Updates of the weights of a rank by its script, between two calls, as the ranks of a pipeline compare it.

rank 0   pipe.step ── clip x0.5 ── AdamW.step ──► "AdamW(lr=0.001), lr x 1", 1 step, gradients x 0.5 ──► pipe.step
rank 1   pipe.step ── clip x0.2 ──────────────► nothing, 0 steps                                     ──► pipe.step

Optimizers are seen by the hooks that torch calls around each `step`. Gradients are seen by a few elements, at the end of a call,
when an optimizer begins, and at the next call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipecompile.distributed.agreement.optimizer_settings import OptimizerSettings
from pipecompile.distributed.agreement.whole_model_calls import refuse_optimizer
from pipecompile.torch_private.dtensors import local
from pipecompile.torch_private.storages import version_of

__all__ = ["Updates", "WeightUpdates"]


class Calls(Protocol):
    """The calls of a pipeline, of which some have time for more than the others."""

    @property
    def is_due(self) -> bool: ...


Named = Iterable[tuple[str, nn.Parameter]]

_PROBED = 4
"""Parameters that are looked at in each call."""

_ROUNDING = 0.01
"""Relative difference of two factors that are taken for one."""


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates of the weights of a rank between two calls.

    steps      steps of the optimizer that made most; 0 also for weights that change without one
    settings   of the optimizers that stepped, in words
    factor     that gradients were multiplied by before the first step; None if nothing is known of it, or if they had several
    parameter  the first one of the rank that is trained, and `is_changed` says whether any was
    is_kept    whether gradients are still there, to be added to; None if that is not known, and without a step of an optimizer
    """

    steps: int
    settings: tuple[str, ...]
    factor: float | None
    parameter: str
    is_changed: bool
    is_kept: bool | None = None

    @property
    def key(self) -> str:
        """A text that is equal on ranks that do the same."""
        factor = "" if self.factor is None else f"{self.factor:.2g}"
        kept = self.is_kept if self.steps else None
        return f"{self.steps} {sorted(self.settings)} {factor} {kept}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Updates:
        fields = json.loads(text)
        return cls(**fields | {"settings": tuple(fields["settings"])})


class _StepCount:
    """The steps of optimizers that were made since some time."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self._settings = set[str]()

    def note(self, optimizer: Optimizer, settings: set[str]) -> None:
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self._settings |= settings

    def updates(self, factor: float | None, parameter: str, *, is_changed: bool) -> Updates:
        steps = max(self.steps.values(), default=0)
        return Updates(steps, tuple(sorted(self._settings)), factor, parameter, is_changed)


class WeightUpdates:
    """The updates of the parameters of one rank, call after call. `named` yields them, once they have a place.

    The pipeline has `n_ranks` in a copy. `refuse` raises an error for what uses gradients that are not whole. Nothing is watched for one
    `is_alone`, without other ranks.
    """

    def __init__(
        self, named: Callable[[], Named], n_ranks: int, refuse: Callable[[str], object] = str, *, is_alone: bool
    ) -> None:
        self._named, self._n_ranks, self._refuse, self._is_alone = named, n_ranks, refuse, is_alone
        self._probes: list[tuple[str, nn.Parameter]] = []
        self._versions, self._gradients = list[int](), list[float | None]()
        self._of_call, self._of_step = _StepCount(), _StepCount()
        self._settings: WeakKeyDictionary[Optimizer, OptimizerSettings] = WeakKeyDictionary()
        self._is_of_others: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._factor: float | None = None
        self._is_within = False
        if not is_alone:
            _watch(self)

    @contextmanager
    def of_program(self, calls: Calls) -> Iterator[None]:
        """Run a call in this context: what changes weights in it is not an update by the script."""
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False
            if not self._is_alone:
                self.end(is_due=calls.is_due)

    def end(self, *, is_due: bool) -> None:
        """End a call. `is_due` says whether to look which parameters are trained, and to read gradients of GPUs."""
        if is_due or not self._probes:
            self._probes = _spread([(name, one) for name, one in self._named() if one.requires_grad])
            self._is_of_others.clear()
        self._versions = [version_of(parameter) for _, parameter in self._probes]
        self._gradients = [_element(parameter.grad, is_due=is_due) for _, parameter in self._probes]
        self._of_call, self._factor = _StepCount(), None

    def since_last_call(self) -> Updates | None:
        """Return what was done since the last call; None on a rank that trains nothing, or if that is not known."""
        if not self._probes:
            return None
        is_changed = [version_of(parameter) for _, parameter in self._probes] != self._versions
        made = self._of_call.updates(self._factor, self._probes[0][0], is_changed=is_changed)
        return replace(made, is_kept=self._are_gradients_kept()) if made.steps else made

    def _are_gradients_kept(self) -> bool | None:
        """Return whether the gradients that the last call has left are there, and not zero. Return None where it has left none, if some
        were cleared, and of parameters that are frozen, or left the model: no optimizer clears these.
        """
        pairs = zip(self._probes, self._gradients, strict=True)
        left = [one for (_, one), before in pairs if before and one.requires_grad]
        kept = [one.grad is not None and not _is_zero(one.grad) for one in left]
        if not kept or not all(kept):
            return False if kept and not any(kept) else None
        own = {id(parameter) for _, parameter in self._named()}
        return True if all(id(one) in own for one in left) else None

    def since_last_step(self) -> Updates | None:
        """Return, once, what optimizers did since this was asked last, as copies do in each step."""
        count, self._of_step = self._of_step, _StepCount()
        return count.updates(None, self._probes[0][0], is_changed=False) if self._probes else None

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note the gradients that an optimizer is about to use. Raises InputError for one that needs those of all ranks."""
        if self._is_within or not self._is_own(optimizer):
            return
        refuse_optimizer(optimizer, self._n_ranks)
        self._refuse(f"a step of {type(optimizer).__name__}")
        if not self._of_call.steps:
            now = [_element(parameter.grad, is_due=True) if before else None
                   for (_, parameter), before in zip(self._probes, self._gradients, strict=True)]  # fmt: skip
            self._factor = _factor(self._gradients, now)

    def end_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer."""
        if self._is_within or not self._is_own(optimizer):
            return
        if optimizer not in self._settings:
            self._settings[optimizer] = OptimizerSettings(optimizer)
        settings = self._settings[optimizer].of_step(optimizer)
        self._of_call.note(optimizer, settings)
        self._of_step.note(optimizer, settings)

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of this rank."""
        if optimizer not in self._is_of_others:
            own = {id(parameter) for _, parameter in self._named()}
            updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._is_of_others[optimizer] = not any(id(parameter) in own for parameter in updated)
        return not self._is_of_others[optimizer]


def _spread(named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Return a few parameters, the first and the last among them."""
    last, count = len(named) - 1, min(_PROBED, len(named))
    return [named[round(place * last / max(count - 1, 1))] for place in range(count)]


def _element(gradient: torch.Tensor | None, *, is_due: bool) -> float | None:
    """Return an element in the middle of a gradient, None for one that says nothing."""
    if gradient is None:
        return None
    gradient = local(gradient)
    if gradient.layout != torch.strided or not gradient.numel() or not (is_due or gradient.device.type == "cpu"):
        return None
    element = _in_the_middle(gradient)
    return element if isfinite(element) and element else None


def _is_zero(gradient: torch.Tensor) -> bool:
    """Return whether the element in the middle of a gradient is zero."""
    gradient = local(gradient)
    return gradient.layout == torch.strided and not _in_the_middle(gradient)


def _in_the_middle(gradient: torch.Tensor) -> float:
    values = gradient.detach() if gradient.requires_grad else gradient
    element = values[tuple([size // 2 for size in values.shape])].item()
    return abs(element) if isinstance(element, complex) else float(element)


def _factor(before: list[float | None], now: list[float | None]) -> float | None:
    """Return the one factor between these gradients and those, if there is one."""
    factors = [new / old for old, new in zip(before, now, strict=True) if old and new]
    if not factors or max(factors) - min(factors) > _ROUNDING * abs(max(factors, key=abs)):
        return None
    return factors[0]


_watches: WeakSet[WeightUpdates] = WeakSet()
"""Those of all pipelines of this process."""


def _watch(updates: WeightUpdates) -> None:
    """Let torch call this before and after each step of an optimizer, from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_begin_step))
        _hooks.append(register_optimizer_step_post_hook(_end_step))
    _watches.add(updates)


_hooks: list[Any] = []


def _begin_step(optimizer: Optimizer, *_: Any) -> None:
    for updates in (*_watches,):
        updates.begin_step(optimizer)


def _end_step(optimizer: Optimizer, *_: Any) -> None:
    for updates in (*_watches,):
        updates.end_step(optimizer)
