"""A call of a loss function that is no part of a step: what it writes and draws is undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pipecompile.torch_private.accelerators import forked_generators
from pipecompile.tracing.state.function_state import function_restored
from pipecompile.tracing.state.random_states import python_sources, random_states_restored

__all__ = ["loss_undone"]


@contextmanager
def loss_undone(loss_fn: Any, device: torch.device) -> Iterator[None]:
    """Restore what a loss function writes in this context, and turn gradients on."""
    with ExitStack() as stack:
        stack.enter_context(random_states_restored(python_sources()))
        stack.enter_context(forked_generators([device]))
        stack.enter_context(function_restored(loss_fn))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield
