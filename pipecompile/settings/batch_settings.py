"""Options of a mini-batch: how it is divided into micro-batches, and the loss of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any

from torch import nn

from pipecompile.batching.batch_dims import BatchDims
from pipecompile.batching.packed_split import Splits
from pipecompile.errors import InputError
from pipecompile.settings.value_checks import Group, choice, flag, function, refusal, whole_number
from pipecompile.text.shown_value import shown

__all__ = ["BatchSettings", "example_inputs"]


def _dimensions(name: str, value: Any) -> BatchDims:
    """Return batch dimensions by parameter. `check_batch_dims` compares names and dimensions with the model's forward."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refusal(
            name, value, "a mapping of parameter names to dimensions", hint=f'{name}={{"mask": None, "src": 1}}'
        )
    is_number = {key: isinstance(dim, Integral) and not isinstance(dim, bool) for key, dim in value.items()}
    return {key: int(dim) if is_number[key] else dim for key, dim in value.items()}


def _splits(name: str, value: Any) -> Splits:
    """Return how arguments that are not cut by rows become those of a micro-batch. Raise InputError for another rule."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refusal(name, value, "a mapping of parameter names to rules", hint=f'{name}={{"cu_seqlens": "offsets"}}')
    for key, rule in value.items():
        if not callable(rule) and not (isinstance(rule, str) and rule in ("offsets", "lengths")):
            hint = f'{name}={{"{key}": "offsets"}}, "lengths", or a function of (value, samples of each micro-batch)'
            raise InputError(f"{name}[{shown(key)}] is {shown(rule)}", hint=hint)
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Group):
    """Micro-batches, batch dimensions and the loss."""

    n_microbatches: Annotated[int | str | None, whole_number(8, "auto", None, most=1_000_000)]
    batch_dims: Annotated[BatchDims, _dimensions]
    split: Annotated[Splits, _splits]
    loss_fn: Annotated[Callable[..., Any] | None, function("torch.nn.functional.cross_entropy")]
    loss_reduction: Annotated[str, choice("mean", "sum")]
    has_aux: Annotated[bool, flag]
    batch_norm: Annotated[str | None, choice(None, "each", "deferred")]
    across_batch: Annotated[str | None, choice(None, "each", "exact")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_aux and self.loss_fn is None:
            raise InputError(
                "has_aux=True is without a loss_fn",
                why="loss_fn returns the auxiliary values beside the loss",
                hint="loss_fn=lambda output: (loss(output), aux), or has_aux=False",
            )
        if self.across_batch == "exact" and self.split:
            raise InputError(
                'across_batch="exact" is given together with split',
                why="the outputs of packed sequences are not joined to those of a mini-batch",
                hint='across_batch="each", or n_microbatches=1 without split',
            )

    @cached_property
    def is_target_required(self) -> bool:
        """Whether `loss_fn` has a second parameter without a default."""
        called = self.loss_fn.forward if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        try:
            inspect.signature(called).bind(None) if called else None
        except TypeError:
            return True
        except ValueError:  # a builtin without a signature raises its own error when it is called
            return False
        return False


def example_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example mini-batch as (positional, keyword) arguments of the model's forward. Raise InputError otherwise."""
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise refusal("example_args", args, "a tuple of arguments", hint="example_args=(x,)")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        hint = 'example_kwargs={"mask": mask}'
        raise refusal("example_kwargs", kwargs, "a mapping of parameter names to arguments", hint=hint)
    return tuple(args), dict(kwargs or {})
