"""Models with branches that do not depend on each other, and random DAGs of stages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

from pipecompile.ir import Route

__all__ = ["Towers", "dag", "pinned"]


class Towers(nn.Module):
    """Towers of equal layers side by side on one input, and a head on the sum of their outputs."""

    def __init__(self, n_towers: int, depth: int = 1, width: int = 16, head_depth: int = 1) -> None:
        super().__init__()
        self.towers = nn.ModuleList(_layers(depth, width) for _ in range(n_towers))
        self.join, self.head = Join(), _layers(head_depth, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.join(*[tower(x) for tower in self.towers]))


class Join(nn.Module):
    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack(values).sum(0)


def _layers(depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


def pinned(n_towers: int) -> dict[str, int]:
    """Return the pins that give every tower a stage of its own, and the head the last."""
    return {f"towers.{i}": i for i in range(n_towers)} | {"join": n_towers, "head": n_towers}


def dag(n_stages: int, seed: int) -> tuple[Route, ...]:
    """Return the routes of a random DAG of stages in which every stage leads to the last."""
    draw, routes = random.Random(seed), []
    for stage in range(n_stages - 1):
        later: Sequence[int] = range(stage + 1, n_stages)
        ends = sorted(draw.sample(later, min(len(later), draw.choice([1, 1, 1, 2, 3]))))
        routes.append(Route(f"v{stage}", stage, tuple(ends)))
    return tuple(routes)
