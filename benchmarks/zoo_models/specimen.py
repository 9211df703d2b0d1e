"""What the zoo knows of a model: how to build it, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Call", "Specimen", "images", "quiet"]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Specimen:
    """`inputs(n)` makes a call with n samples. `skipped` says why there is nothing to examine. `lists` names the arguments that
    are lists with an entry per sample. `longer` makes calls of another length. `dims` are batch dimensions of keyword arguments that
    are not 0, None for what all samples share. `smaller` is the same model with fewer blocks or smaller inputs, for a story of many steps.
    """

    library: str
    group: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Call]
    skipped: str = ""
    lists: tuple[str, ...] = ()
    longer: Callable[[int], Call] | None = None
    dims: Mapping[str, int | None] = field(default_factory=dict)
    smaller: Specimen | None = None

    @property
    def batch_dims(self) -> dict[str, Any]:
        return {**dict.fromkeys(self.lists, list), **self.dims}


def images(size: int, channels: int = 3) -> Callable[[int], Call]:
    """Square images as the only argument."""
    return lambda n: Call((torch.randn(n, channels, size, size),))


_RATES = (
    "p",
    "drop_prob",
    "drop_path",
    "drop_rate",
    "attn_drop",
    "attn_drop_p",
    "layerdrop",
    "noise_std",
    "gate_noise",
)


def quiet(model: nn.Module) -> nn.Module:
    """Switch off what draws random numbers: two runs that draw in another order can then be compared."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _is_rate(module, name):
                setattr(module, name, 0.0)
    return model


def _is_rate(module: nn.Module, name: str) -> bool:
    if name in ("p", "drop_prob", "sample_drop_ratio", "prob"):
        return any(word in type(module).__name__.lower() for word in ("drop", "stochastic", "rate"))
    return name in _RATES or any(word in name for word in ("dropout", "layerdrop", "drop_connect"))
