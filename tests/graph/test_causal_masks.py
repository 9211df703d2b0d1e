"""Masks that a model makes from positions alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.graph.causal_masks import constants_of, is_causal_mask


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mask(x, x.shape[1]).to(x.dtype)


def with_floor(_: Tensor, n: int) -> Tensor:
    return torch.full((n, n), torch.finfo(torch.float32).min).triu(1)


MASKS = {
    "tril": (lambda _, n: torch.ones(n, n, dtype=torch.bool).tril(), True),
    "compared": (lambda _, n: torch.arange(n)[:, None] >= torch.arange(n), True),
    "per sample": (lambda x, n: torch.ones(n, n, dtype=torch.bool).tril().expand(x.shape[0], n, n), True),
    "infinite": (lambda _, n: torch.full((n, n), -torch.inf).triu(1), True),
    "floor": (with_floor, True),
    "window": (lambda _, n: torch.ones(n, n, dtype=torch.bool).tril().triu(-1), False),
    "triu": (lambda _, n: torch.ones(n, n, dtype=torch.bool).triu(), False),
    "numbers": (lambda _, n: torch.ones(n, n).tril(), False),
    "of the input": (lambda x, n: (x[0] > 0).expand(n, n), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_compared_with_a_triangle(name: str) -> None:
    mask, is_causal = MASKS[name]
    graph = pc.trace(Masked(mask), torch.randn(3, 4, 4) if name == "per sample" else torch.randn(3, 4))
    product = next(node for node in reversed(graph.graph.nodes) if "matmul" in node.name)
    made = product.all_input_nodes[1]
    assert (
        is_causal_mask(graph, made.all_input_nodes[0] if name not in ("infinite", "floor", "numbers") else made)
        == is_causal
    )


def test_constants_depend_on_no_input() -> None:
    graph = pc.trace(Masked(MASKS["compared"][0]), torch.randn(3, 4))
    names = {node.name for node in constants_of(graph)}
    assert any("arange" in name for name in names)
    assert not any("matmul" in name for name in names)
