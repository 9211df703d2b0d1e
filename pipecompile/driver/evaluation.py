"""Evaluation: the usual loop over validation batches, in eval mode and without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipecompile.batching.containers import on_device
from pipecompile.batching.empty_batch import require_no_target
from pipecompile.batching.microbatch_list import arguments_of
from pipecompile.errors import InputError
from pipecompile.options import Options
from pipecompile.runtime.results import own_loss
from pipecompile.text.shown_value import shown, type_text

__all__ = ["Evaluation", "ValidationLoop", "RunningTotal", "evaluating"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    loss       mean over all samples, or the sum over all batches with `loss_reduction="sum"`
    samples    number of samples; of batches, for inputs without a batch dimension
    metrics    mean of each metric over all samples, by name; "metric" for a function that returns one number
    """

    loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class RunningTotal:
    """Sums of losses and metrics, weighted by samples. The sums stay on their devices until the end."""

    def __init__(self, *, is_mean: bool) -> None:
        self.is_mean, self.samples = is_mean, 0
        self.loss: Any = 0.0
        self.metrics: dict[str, Any] = {}

    def add(self, loss: torch.Tensor, samples: int | None, metrics: Any = None) -> None:
        """Add the loss and the metrics of a batch. A metric is a number, a mapping to numbers, or None."""
        count = 1 if samples is None else samples
        self.samples += count
        self.loss = self.loss + loss.detach().double() * (count if self.is_mean else 1)
        named = metrics if isinstance(metrics, Mapping) else {} if metrics is None else {"metric": metrics}
        for name, value in named.items():
            number = _number(name, value)
            self.metrics[name] = self.metrics.get(name, 0.0) + number * count

    def evaluation(self) -> Evaluation:
        """Return the means. Raise InputError if there was no batch."""
        if not self.samples:
            raise InputError(
                "there is nothing to evaluate", why="the loader has no batch", hint="pipe.evaluate([(x, y)])"
            )
        means = {name: float(total) / self.samples for name, total in self.metrics.items()}
        return Evaluation(float(self.loss) / (self.samples if self.is_mean else 1), self.samples, means)


def _number(name: str, value: Any) -> Any:
    """Return a metric of a batch as one number. Raise InputError if it is not one."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().double().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type_text(value)
        hint = "metric=lambda output, target: (output.argmax(1) == target).float().mean()"
        raise InputError(f"the metric {shown(name)} returned {kind}, not a number per batch", hint=hint) from None


@contextmanager
def evaluating(model: nn.Module, train: Callable[[bool], Any]) -> Iterator[None]:
    """Put the model into eval mode by `train(False)`, without gradients; afterwards restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    try:
        train(False)
        with torch.no_grad():
            yield
    finally:
        train(modes[model])  # a `train` of the user may do more than set the mode
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True, slots=True)
class ValidationLoop:
    """The evaluation of one pipeline. `samples_of` returns the number of samples in a call, None without a batch.

    A batch for which `is_skipped` holds counts nothing. `around` gives a context for the user's functions on the output.
    """

    pipe: Any
    options: Options
    samples_of: Callable[[tuple[Any, ...], dict[str, Any]], int | None]
    is_skipped: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda *_: False
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self, batches: Iterable[Any], metric: Callable[..., Any] | None) -> Evaluation:
        """Return the losses and metrics of all batches, in eval mode and without gradients."""
        return self.total(batches, metric).evaluation()

    def total(self, batches: Iterable[Any], metric: Callable[..., Any] | None) -> RunningTotal:
        """Return the sums of losses and metrics of all batches, in eval mode and without gradients."""
        if not isinstance(batches, Iterable) or isinstance(batches, torch.Tensor):
            raise InputError(f"evaluate takes batches, not {type_text(batches)}", hint="evaluate(loader)")
        if metric is not None and not callable(metric):
            raise InputError(f"metric={shown(metric)} is not a function", hint="metric=lambda output, target: ...")
        total = RunningTotal(is_mean=self.options.loss_reduction == "mean")
        with evaluating(self.pipe.model, self.pipe.train):
            for number, batch in enumerate(batches):
                args, kwargs = self._arguments(number, batch)
                inputs = {name: value for name, value in kwargs.items() if name != "target"}
                if self.is_skipped(args, inputs):
                    require_no_target(kwargs.get("target"), self.options.batch_dims)
                    continue
                samples = self.samples_of(args, inputs)
                loss, metrics = (
                    self._with_metric(metric, args, kwargs) if metric is not None else (self._loss(args, kwargs), None)
                )
                total.add(loss, samples, metrics)
        return total

    def _arguments(self, number: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a batch. Raise InputError if its target is missing."""
        args, kwargs = arguments_of(batch, with_target=self.options.is_target_required)
        if self.options.is_target_required and kwargs.get("target") is None:
            hint = "evaluate(loader) of batches (x, y); evaluate([(x, y)]) for one batch"
            raise InputError(f"batch {number} has no target", why="loss_fn takes a target", hint=hint)
        return args, kwargs

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        result = self.pipe.step(*args, **kwargs)
        return result[0] if self.options.has_aux else result  # type: ignore[no-any-return]

    def _with_metric(
        self, metric: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Return loss and metric of the whole batch: the model's output is put together for them."""
        inputs = {name: value for name, value in kwargs.items() if name != "target"}
        output = self.pipe(*args, **inputs)
        device = self.pipe.devices[self.pipe.plan.placement[-1]]
        target = [on_device(kwargs["target"], device)] if kwargs.get("target") is not None else []
        with self.around():
            loss = self.options.loss_fn(output, *target) if self.options.loss_fn else own_loss(output)
            if loss is None:
                raise InputError(
                    "evaluate needs a loss: the model's output is not a scalar, and has no attribute `loss`",
                    hint="compile(..., loss_fn=torch.nn.functional.cross_entropy)",
                )
            return loss[0] if self.options.has_aux else loss, metric(output, *target)
