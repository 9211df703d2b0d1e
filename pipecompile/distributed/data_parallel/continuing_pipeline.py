"""A pipeline of several copies that continues without lost copies: a failed call is undone, and the other copies repeat it.

call ──► all ranks are past their part ──► done, on all
  ▲  └─► a rank of another copy fails ──► undone, on all that are left ──► new groups ─┐
  └────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from pipecompile.distributed.data_parallel.call_outcome import CallOutcome
from pipecompile.distributed.data_parallel.call_undo import CallUndo
from pipecompile.distributed.data_parallel.lost_copies import LostCopies
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_pipeline import RankPipeline
from pipecompile.driver.call_lock import exclusive
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.evaluation import RunningTotal
from pipecompile.errors import InputError, RunError
from pipecompile.ir.timeline import Timeline
from pipecompile.options import Options

__all__ = ["ContinuingPipeline"]

_Result = TypeVar("_Result")


class ContinuingPipeline(RankPipeline):
    """A pipeline on ranks with `lost_copies="continue"`."""

    def __init__(self, model: nn.Module, options: Options, ranks: RankMesh, copied: CompileCache | None = None) -> None:
        super().__init__(model, options, ranks, copied)
        assert self._backend.copies is not None
        self._lost = LostCopies(self._communicator)
        self._outcome = CallOutcome(self._communicator, self._backend.pipeline, self._backend.copies)

    @contextmanager
    def _together(self, function: str, *args: Any, in_copy: bool = False, **kwargs: Any) -> Iterator[None]:
        with super()._together(function, *args, in_copy=in_copy, **kwargs):
            yield
            if self._goes_on:
                self._outcome.agree(in_copy=in_copy)

    @property
    def _goes_on(self) -> bool:
        """Whether a call that fails can be made again: there are other copies, and the pipeline is compiled."""
        return len(self._ranks.left) > 1 and bool(self._cache)

    @exclusive
    def _made(self, name: str, call: Callable[[], _Result], inputs: Any = (), *, runs: bool = True) -> _Result:
        """Make a call until no rank of another copy fails in it. `runs` says whether the call runs the model.

        Raises RunError if this rank's own copy is lost.
        """
        while self._goes_on:
            self.replicas.parts, self.replicas.keeps_earlier = (), True
            undo = self._undo(inputs, runs=runs)
            try:
                self._lost.check()
                result = call()
            except RunError as error:
                if self._communicator.guard.lost is None:
                    raise
                with self._lost.leaving():
                    undo.restore()
                    self._lost.go_on(error, name, self.replicas.parts, self.replicas.unit)
                self._outcome.renew()
                self._lockstep.calls = 0
            else:
                undo.settle()
                return result
        self.replicas.keeps_earlier = False
        with self._lost.leaving():
            return call()

    def _undo(self, inputs: Any, *, runs: bool) -> CallUndo:
        loss = self._options.loss_fn
        modules = [self.model, *([loss] if isinstance(loss, nn.Module) else [])] if runs else []
        return CallUndo(modules, self._is_here, self._cache, inputs)

    # -- the calls ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        self._made("pipe.prepare", partial(super().prepare, *args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._with_list(kwargs)
        return self._made("pipe", partial(super().forward, *args, **kwargs), (args, kwargs))

    def step(self, *args: Any, microbatches: Iterable[Any] | None = None, **kwargs: Any) -> Any:
        microbatches = self._listed_once(microbatches)
        call = partial(super().step, *args, microbatches=microbatches, **kwargs)
        inputs = {name: value for name, value in kwargs.items() if name != "scaler"}
        return self._made("pipe.step", call, (args, inputs, microbatches))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        call = partial(super().clip_grad_norm_, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return self._made("pipe.clip_grad_norm_", call, runs=False)

    def no_sync(self) -> NoReturn:
        """Raise InputError: what a copy holds would be lost with it, and a step made again would be without its samples."""
        raise InputError(
            'no_sync() is used with lost_copies="continue"',
            why="the gradients that a copy holds would be lost with it",
            hint="steps that sum their gradients each; or compile without lost_copies",
        )

    def sum_over_copies(self, values: Any) -> Any:
        return self._made("pipe.sum_over_copies", partial(super().sum_over_copies, values), runs=False)

    def gathered(self) -> Timeline | None:
        return self._made("pipe.gathered", super().gathered, runs=False)

    def full_state_dict(self) -> dict[str, Any]:
        return self._made("pipe.full_state_dict", super().full_state_dict, runs=False)

    def _begin_evaluation(self, stack: ExitStack) -> None:
        self._made("pipe.evaluate", partial(super()._begin_evaluation, stack), runs=False)

    def _sum_of_copies(self, total: RunningTotal) -> RunningTotal:
        return self._made("pipe.evaluate", partial(super()._sum_of_copies, total), runs=False)
