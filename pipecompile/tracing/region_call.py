"""The run of a region: its part of a graph, under `torch.utils.checkpoint` with the keywords of the user's call.

    forward      inputs ─► part ─► outputs     autograd keeps the inputs, and the parameters in any case
    backward     inputs ─► part ─► what autograd needs, then the gradients of the part

torch would save and restore the CPU's random state around every recomputation, which in threads takes numbers from others. So a
region does that itself: only if the part draws, and under the lock of all cells that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pipecompile.tracing.recompute_flag import region_recomputation
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.state.random_states import RANDOM_LOCK

__all__ = ["RegionCall"]

_Part = Callable[..., tuple[Any, ...]]


class RegionCall:
    """A function that runs `part`, consecutive nodes of a region, on its inputs.

    `held` are the places of inputs that are the model's own, such as parameters: the part keeps them as they are. `draws` says
    that the part draws random numbers, `writes` that it writes tensors of the model, `is_plain` that reentrant autograd can run it.

    A part of a divided region is never reentrant: its gradients would be added up in another order than in the whole region. If it
    writes, it does not stop before its end where the whole region would not.
    """

    def __init__(
        self, region: RecomputedRegion, part: _Part, held: frozenset[int], *, draws: bool, writes: bool, is_plain: bool
    ) -> None:
        self.part, self.held = part, held
        options = {name: value for name, value in region.options if name != "preserve_rng_state"}
        is_reentrant = bool(options.pop("use_reentrant"))
        self.is_reentrant = is_reentrant and is_plain and not region.is_divided
        stays = {"early_stop": False} if writes and (is_reentrant or region.runs_to_end) else {}
        self.options = options | stays
        self.redraws = draws and bool(region.option("preserve_rng_state"))

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.part(*values)
        given = [value for place, value in enumerate(values) if place not in self.held]
        reentrant = self.is_reentrant and any(map(_requires_grad, given))
        call = partial(checkpoint, use_reentrant=reentrant, **({} if reentrant else self.options))
        if torch.compiler.is_compiling():
            return call(partial(self._run, values), *given)  # type: ignore[no-any-return]
        kept = [value if place in self.held else None for place, value in enumerate(values)]
        with RANDOM_LOCK if self.redraws else nullcontext():
            result: tuple[Any, ...] = call(_Runs(self, kept), *given, preserve_rng_state=False)
        return result

    def run(self, kept: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        """Run the part on its kept values and its arguments, in the order of its inputs."""
        arriving = iter(given)
        return self.part(*(value if place in self.held else next(arriving) for place, value in enumerate(kept)))

    def _run(self, kept: Sequence[Any], *given: Any) -> tuple[Any, ...]:
        return self.run(kept, given)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Runs:
    """The runs of one call of a region: first its forward, then recomputations."""

    def __init__(self, call: RegionCall, kept: Sequence[Any]) -> None:
        self.call, self.kept = call, kept
        self.is_first = True
        self.states: list[_State] = []

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if self.is_first:
            self.is_first = False
            self.states = _states(given) if self.call.redraws else []
            return self.call.run(self.kept, given)
        with region_recomputation, _restored(self.states, given) if self.states else nullcontext():
            return self.call.run(self.kept, given)


_State = Callable[[], object]
"""Sets a generator to the state in which it was."""


def _states(values: Sequence[Any]) -> list[_State]:
    """Return the random states of the CPU and of the devices of these tensors, as torch's checkpoint keeps them."""
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    states: list[_State] = [partial(torch.set_rng_state, torch.get_rng_state())]
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            states.append(partial(module.set_rng_state, module.get_rng_state(device), device))
    return states


@contextmanager
def _restored(states: Sequence[_State], values: Sequence[Any]) -> Iterator[None]:
    """Set the generators to these states, and at the end back to the present ones."""
    with RANDOM_LOCK:
        present = _states(values)
        try:
            for restore in states:
                restore()
            yield
        finally:
            for restore in present:
                restore()
