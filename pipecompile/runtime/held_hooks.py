"""Hooks on gradients of parameters that several backwards of a micro-batch reach: each runs once, on the complete gradient.

    a weight of stages 0 and 2     2B0 ─► kept   0B0 ─► kept + own ─► hooks ─► .grad ─► hooks after accumulation

Every stage runs its own backward, in which autograd calls the hooks on that stage's part of the gradient. In a loop over micro-batches
they get the sum. So during a run the hooks of such parameters are held: a part goes neither to them nor to `.grad`, and the last
backward of the micro-batch that can reach the parameter passes the sum on. A parameter that a loss may read counts as one of the last
stage too. Parameters joined by `register_multi_grad_hook` are passed on in one backward. A run without hooks holds nothing.

On GPUs nothing is held, and neither are hooks on the node that adds to `.grad`: a warning says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock, local
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.errors import RecordingWarning
from pipecompile.ir import Action, Kind, Program
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.autograd_engine import (
    accumulate,
    gradient_hook_tables,
    has_joint_hook,
    hooks_of_tensor,
    will_accumulate,
)
from pipecompile.tracing.user_source import warn

__all__ = ["HeldHooks"]

_ADVICE = "register_post_accumulate_grad_hook on a CPU, or .grad after the step"

_PER_STAGE = (
    "hooks on the gradient of {} run once per stage and micro-batch: several stages use it, and a loop over micro-batches runs them once, "
    "on the whole gradient. Try {}"
)
_PER_COPY = (
    "hooks on the gradient of {} run once on the sum of the micro-batches of each other copy of its stage: a loop over micro-batches runs "
    "them on each. Try {}"
)

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


class HeldHooks:
    """The hooks that one program holds while it runs. `joins`: I does the work of W."""

    def __init__(self, program: Program, cells: Sequence[Cell | VariantCell]) -> None:
        self.joins, self.is_active, self._is_warned = False, False, False
        self._program, self._cells = program, tuple(cells)
        self._left: Counter[tuple[int, int]] = Counter()
        self._held: list[_HeldParameter] = []
        self.thread = _ThreadState()

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of a backward, which passes on what is complete at its end."""
        is_whole = action.kind is Kind.BACKWARD or (self.joins and action.kind is Kind.INPUT_GRAD)
        is_alone = is_whole and self._program.n_stages == self._program.n_slices == 1
        if is_alone or (self.joins and action.kind is Kind.WEIGHT_GRAD):
            return run
        place = action.stage, action.microbatch // self._program.n_slices

        def function(frame: Frame) -> None:
            if self.is_active:
                self._run(run, frame, place, is_whole=is_whole)
            else:
                run(frame)

        return function

    @contextmanager
    def during(self, hooked: Iterable[torch.Tensor], watched: Collection[torch.Tensor] = ()) -> Iterator[None]:
        """Hold the hooks of those of `hooked` that several backwards of a micro-batch can reach, until the block ends. Warn of those
        that cannot be held, as of all that are `watched`.
        """
        actions = [one.action for row in self._program.rows for one in row if one.action is not None]
        ends = [one for one in actions if one.kind in _BACKWARDS and not (self.joins and one.kind is Kind.WEIGHT_GRAD)]
        self._left = Counter((one.stage, one.microbatch // self._program.n_slices) for one in ends)
        unheld = {id(one) for one in (*hooked, *watched) if one.device.type != "cpu"} | set(map(id, watched))
        self.warn_of([one for one in (*hooked, *watched) if id(one) in unheld])
        self._held = self._parameters([one for one in hooked if id(one) not in unheld and one.requires_grad])
        self.is_active = bool(self._held)
        try:
            for held in self._held:
                held.attach()
            yield
        finally:
            for held in self._held:
                held.detach()
            self._held, self.is_active = [], False

    def _parameters(self, hooked: Sequence[torch.Tensor]) -> list[_HeldParameter]:
        """Return those of `hooked` that are to be held. Those with joint hooks are complete when all of them are."""
        joint = [one for one in hooked if has_joint_hook(one)]
        together = frozenset[int]().union(*(self._stages(one) for one in joint))
        stages = {id(one): self._stages(one) for one in hooked} | {id(one): together for one in joint}
        is_split = max(self._left.values(), default=0) > 1
        joined, held = set(map(id, joint)), [one for one in hooked if is_split or len(stages[id(one)]) > 1]
        return [_HeldParameter(one, stages[id(one)], self, is_joint=id(one) in joined) for one in held]

    def warn_of(self, unheld: Sequence[torch.Tensor], advice: str = _ADVICE, *, has_copies: bool = False) -> None:
        """Warn once of hooks that run once per stage, or on sums of other ranks that have copies of the stages."""
        if self._is_warned or not unheld:
            return
        used = Counter(
            own for cell in self._cells for own in frozenset().union(*(one.parameters for one in cell.all_cells))
        )
        modules = [module for cell in self._cells for module in cell.modules]
        names = {id(own): name for module in modules for name, own in module.named_parameters()}
        shared = [one for one in unheld if used[id(one)] > 1]
        if shared or has_copies:
            self._is_warned = True
            name = names[id((shared or unheld)[0])].removeprefix("_of_model.")
            warn((_PER_STAGE if shared else _PER_COPY).format(name, advice), RecordingWarning)

    def _stages(self, parameter: torch.Tensor) -> frozenset[int]:
        """Return the stages whose backward can reach a parameter."""
        last = len(self._cells) - 1
        reading = {last} if any(effects.loss is not None for effects in self._cells[last].all_effects) else set()
        cells = enumerate(self._cells)
        return frozenset(
            reading | {s for s, cell in cells if any(id(parameter) in one.parameters for one in cell.all_cells)}
        )

    def _run(self, run: Run, frame: Frame, place: tuple[int, int], *, is_whole: bool) -> None:
        self.thread.place, self.thread.is_whole = place, is_whole
        try:
            run(frame)
        finally:
            self.thread.place = None
            while self.thread.entered:
                self.thread.entered[-1].leave()
        self._left[place] -= 1
        self._pass_on(place[1])

    def _pass_on(self, microbatch: int) -> None:
        """Add what is kept of a micro-batch to `.grad`, of parameters that no backward of it can reach any more."""
        if not any(microbatch in one.parts for one in self._held):
            return
        done = [one for one in self._held if microbatch in one.parts and not self.left_of(one.stages, microbatch)]
        with ExitStack() as locks:
            for held in done:
                locks.enter_context(held.lock)
            parts = [(one.edge, part) for one in done if (part := one.parts.pop(microbatch, None)) is not None]
            roots = [*(edge for edge, _ in parts), _spare()]
            gradients = [*(part for _, part in parts), torch.zeros(())]
            try:
                if parts:
                    accumulate(roots, gradients)
            finally:  # a traceback holds them, which would look like a hook on the node
                parts.clear()
                roots.clear()

    def is_last(self, stages: Collection[int]) -> bool:
        """Return whether no backward of the micro-batch but the one that runs now can reach a parameter of `stages`."""
        place = self.thread.place
        assert place is not None
        is_own = self.thread.is_whole and place[0] in stages
        return is_own and self.left_of(stages, place[1]) == 1

    def left_of(self, stages: Collection[int], microbatch: int) -> int:
        """Return how many backwards of a micro-batch in `stages` have not ended."""
        return sum(self._left[stage, microbatch] for stage in stages)


class _ThreadState(local):
    """State of a thread: the stage and micro-batch of its backward, and the parameters whose gradient it is about to add."""

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self.is_whole = False
        self.is_open = True
        self.entered: list[_HeldParameter] = []


class _HeldHook:
    """A hook of the user that runs only while its parameter passes on a complete gradient."""

    def __init__(self, hook: Callable[[torch.Tensor], Any], thread: _ThreadState) -> None:
        self.hook, self.thread = hook, thread

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.hook(tensor) if self.thread.is_open else None


class _HeldParameter:
    """A parameter whose hooks are held. From the first hook to the last one of an addition, its thread alone has the lock."""

    def __init__(self, parameter: torch.Tensor, stages: frozenset[int], owner: HeldHooks, *, is_joint: bool) -> None:
        self.parameter, self.stages, self.owner, self.is_joint = parameter, stages, owner, is_joint
        self.edge = get_gradient_edge(parameter)
        self.lock, self.parts = RLock(), dict[int, torch.Tensor]()
        self.gradient: torch.Tensor | None = None

    def attach(self) -> None:
        """Put a hook before those of the user, and one behind."""
        for table in gradient_hook_tables(self.parameter):
            table.update({key: _HeldHook(hook, self.owner.thread) for key, hook in table.items()})
        register: Callable[..., Any] = self.parameter.register_hook
        register_last: Callable[..., Any] = self.parameter.register_post_accumulate_grad_hook
        first, last = register(self._enter), register_last(self._added)
        before = hooks_of_tensor(self.parameter)
        assert before is not None
        for key in [key for key in before if key != first.id]:
            before[key] = before.pop(key)
        self.handles = first, last

    def detach(self) -> None:
        """Give the parameter its own hooks back."""
        del self.edge
        for handle in self.handles:
            handle.remove()
        for table in gradient_hook_tables(self.parameter):
            own = {key: hook.hook for key, hook in table.items() if isinstance(hook, _HeldHook)}
            table.update(own)

    def _enter(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Decide about a part of the gradient. Return the whole if this part completes it."""
        thread = self.owner.thread
        thread.is_open = True
        if thread.place is None or gradient is None or not will_accumulate(self.edge.node):
            return None
        self.lock.acquire()
        thread.entered.append(self)
        kept = self.parts.get(thread.place[1])
        is_of_its_kind = kept is None or kept.layout == gradient.layout  # of which a hook may not return another
        thread.is_open = is_of_its_kind and not self.is_joint and self.owner.is_last(self.stages)
        if not thread.is_open:
            self.gradient, self.parameter.grad = self.parameter.grad, None
            return None
        self.parts.pop(thread.place[1], None)
        return None if kept is None else kept + gradient

    def _added(self, parameter: torch.Tensor) -> None:
        thread = self.owner.thread
        if not thread.entered or thread.entered[-1] is not self:
            return
        if not thread.is_open and thread.place is not None and parameter.grad is not None:
            kept = self.parts.get(thread.place[1])
            self.parts[thread.place[1]] = parameter.grad if kept is None else _sum(kept, parameter.grad)
        self.leave()

    def leave(self) -> None:
        """End an addition, also one that failed: `.grad` is as before, unless the gradient was complete."""
        thread = self.owner.thread
        thread.entered.pop()
        if not thread.is_open:
            self.parameter.grad, self.gradient = self.gradient, None
        thread.is_open = True
        self.lock.release()


def _spare() -> GradientEdge:
    """Return one more root: autograd does not count the only root of a backward among the nodes that it will run."""
    return get_gradient_edge(torch.zeros((), requires_grad=True))


def _sum(kept: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Add two parts of a gradient, of which one may be sparse."""
    return gradient + kept if kept.is_sparse and not gradient.is_sparse else kept + gradient
