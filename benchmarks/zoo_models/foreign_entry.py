"""The registry of models of libraries that the old zoo does not have: a function that imports its library and builds a small model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zoo_models.specimen import Call, Specimen

__all__ = ["Registry", "clip_images", "ids", "pixels", "rows", "sequence", "waves"]

Inputs = Callable[[int], Call]


class Registry:
    """The models of one file, by `@add(library, inputs)` above the function that builds one."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.found: list[Specimen] = []

    def add(
        self, library: str, inputs: Inputs, longer: Inputs | None = None, dims: Mapping[str, int | None] | None = None
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            name = build.__name__.strip("_")
            self.found.append(Specimen(library, self.group, name, build, inputs, longer=longer, dims=dict(dims or {})))
            return build

        return register


def pixels(size: int, channels: int = 3, **rest: Any) -> Inputs:
    """Images in [0, 1)."""
    return lambda n: Call((torch.rand(n, channels, size, size),), dict(rest))


def ids(length: int, vocabulary: int = 64, **rest: Any) -> Inputs:
    """Tokens."""
    return lambda n: Call((torch.randint(1, vocabulary, (n, length)),), dict(rest))


def sequence(length: int, width: int, **rest: Any) -> Inputs:
    """Vectors (batch, length, width)."""
    return lambda n: Call((torch.randn(n, length, width),), dict(rest))


def rows(*shape: int, **rest: Any) -> Inputs:
    """Any tensor of numbers, the batch before `shape`."""
    return lambda n: Call((torch.randn(n, *shape),), dict(rest))


def waves(length: int) -> Inputs:
    """Sound, and the number of its samples."""
    return lambda n: Call((torch.randn(n, length), torch.full((n,), length)))


def clip_images(size: int, length: int, vocabulary: int = 64) -> Inputs:
    """Images, and tokens."""
    return lambda n: Call((torch.rand(n, 3, size, size), torch.randint(1, vocabulary, (n, length))))
