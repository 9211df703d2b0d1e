"""Calls of a loss function that are not part of a step: what they write and draw is undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pipecompile.torch_private.accelerators import forked_generators
from pipecompile.tracing.state.function_state import function_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.random_states import random_sources, random_states_restored

__all__ = ["loss_undone"]


@contextmanager
def loss_undone(loss_fn: Any, device: torch.device) -> Iterator[list[Any]]:
    """Restore what a loss function writes in this context, mute what it prints, and turn gradients on. After it, the list has what had
    changed, with the generators that it drew from.
    """
    sources = random_sources((), [device])
    changed: list[Any] = []
    with ExitStack() as stack:
        states = stack.enter_context(random_states_restored(sources))
        stack.enter_context(forked_generators([device]))
        written = stack.enter_context(function_restored(loss_fn))
        stack.enter_context(output_muted())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield changed
        changed += states.changed()
    changed += written
