"""The context in which a pipeline records, measures and checks a model: what the user has around a step does not see that work.

`FlopCounterMode` around a step counts the step, hooks on saved tensors get tensors of the step, and anomaly mode reads its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipecompile.torch_private.autograd_engine import saved_tensor_hooks_allowed, unhooked
from pipecompile.torch_private.modes import users_modes_removed
from pipecompile.torch_private.modules import hooks_of_torch_removed

__all__ = ["unwatched"]


@contextmanager
def unwatched() -> Iterator[None]:
    """Switch off the user's dispatch modes, hooks on saved tensors and anomaly mode, and torch's hooks of all modules, until the
    block ends.
    """
    with (
        users_modes_removed(),
        hooks_of_torch_removed(),
        torch.autograd.set_detect_anomaly(False),  # it reads the values of gradients, and fakes have none
        saved_tensor_hooks_allowed(),
        unhooked(),
    ):
        yield
