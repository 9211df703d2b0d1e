"""Suggestions for keywords that a function does not have: names of other libraries, and misspelt ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from pipecompile.errors import KeywordError

__all__ = ["with_suggestions"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    "n_microbatches": "chunks microbatches num_microbatches micro_batches n_micro_batches num_micro_batches num_chunks n_chunks",
    "n_stages": "num_stages stages n_devices num_devices pp_size pipeline_parallel_size",
    "loss_fn": "loss criterion loss_function loss_func",
    "devices": "device device_map",
    "example_args": "inputs args example_inputs sample_inputs sample_input mb_args input_shape",
    "example_kwargs": "kwargs mb_kwargs",
    "split_before": "split_points split_spec split_at",
    "keep_together": "no_split_module_classes",
    "checkpoint": "checkpointing recompute activation_checkpointing gradient_checkpointing",
    "memory_limit": "max_memory memory",
    "schedule": "pipeline_schedule",
    "compile_stages": "backend",
}
_SUGGESTED = {theirs: ours for ours, names in _NAMES.items() for theirs in names.split()}
"""Our keyword by a name that another library, or a reader in a hurry, has for it."""

_AROUND = {"amp", "autocast", "dtype", "precision", "mixed_precision"}


def with_suggestions(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a call that does not fit the signature raises KeywordError with what to write, such as `example`."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                hint = _hint(unknown, signature.parameters) if unknown else example
                what = f"has no keyword {unknown!r}" if unknown else f"cannot be called so: {error}"
                raise KeywordError(f"{function.__name__} {what}", hint=hint or example) from None
            return function(*args, **kwargs)

        return checked

    return decorated


def _hint(unknown: str, known: Collection[str]) -> str:
    """Return the keyword to use instead of an unknown one; "" if none is like it."""
    if unknown.lower() in _AROUND:
        return "with torch.autocast(device_type, torch.bfloat16): pipe.step(...)"
    close = _SUGGESTED.get(unknown.lower()) or next(iter(get_close_matches(unknown, known, 1)), "")
    return f"{close}=" if close else ""
