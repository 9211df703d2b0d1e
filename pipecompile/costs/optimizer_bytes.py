"""The size of an optimizer's state as a multiple of the parameters.

adam     exp_avg, exp_avg_sq                     2
sgd      nothing, or with momentum its buffer    0 or 1
"""

from __future__ import annotations

from difflib import get_close_matches

import torch

from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown

__all__ = ["optimizer_state"]

_COPIES = {
    "sgd": 0, "momentum": 1, "asgd": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adadelta": 2, "adam": 2, "adamax": 2,
    "adamw": 2, "nadam": 2, "radam": 2, "rprop": 2, "sparseadam": 2, "amsgrad": 3,
}  # fmt: skip


def optimizer_state(optimizer: str | torch.optim.Optimizer | type[torch.optim.Optimizer] | None) -> int:
    """Return the number of state tensors per parameter, 0 for None.

    An optimizer that has stepped is measured; others are known by class and options. Raise InputError for an unknown
    one.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer)
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    if (key := name.lower().replace("_", "").replace("-", "")) not in _COPIES:
        near = get_close_matches(key, _COPIES) or sorted(_COPIES)
        raise InputError(
            f"optimizer={shown(name)} is not known", why="the optimizer's state counts as memory",
            hint=f"{', or '.join(f'optimizer={each!r}' for each in near[:3])}; or the optimizer itself, after its first step",
        )  # fmt: skip
    return _COPIES[key]


def _of_instance(optimizer: torch.optim.Optimizer) -> int:
    kept = [
        sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state.values())
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and parameter.dim()
    ]
    if kept:
        return max(kept)
    options = optimizer.defaults
    more = bool(options.get("amsgrad"))
    if type(optimizer).__name__ in ("SGD", "RMSprop"):
        more = bool(options.get("momentum"))
    return optimizer_state(type(optimizer)) + more + bool(options.get("centered"))
