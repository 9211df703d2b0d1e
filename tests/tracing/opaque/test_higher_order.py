"""Operators that take functions are kept whole with the submodule that calls them; block masks go in like any object."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from bodies import Body
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import pipecompile as pc


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


class Attention(nn.Module):
    """Of torch's flexible kind, with a learned slope per head that its score function closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.slope = nn.Linear(16, 48), nn.Parameter(torch.rand(2))

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        made = flex_attention(q, k, v, lambda score, b, h, i, j: score - self.slope[h] * (i - j), mask)
        return made.transpose(1, 2).reshape(x.shape)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Attention(), Attention(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return self.last(self.second(x + self.first(x, mask), mask))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention_is_kept_whole_and_its_mask_goes_in(masked: bool) -> None:
    """On CPU it has no backward, so all of it is without gradients."""
    model = Blocks().eval()
    mask = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16) if masked else None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        pipe = pc.compile(
            model, 2, example_args=(torch.randn(4, 32, 16), mask), n_microbatches=2, cost="analytic",
            batch_dims={"mask": None},
        )  # fmt: skip
        for size in (4, 3):
            x = torch.randn(size, 32, 16)
            torch.testing.assert_close(pipe(x, mask), model(x, mask))
    assert {reason.piece.name for reason in pipe.graph.facts.kept} == {"first", "second"}
    assert {reason.fault.code for reason in pipe.graph.facts.kept} == {"PC115"}


class Choice(nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, torch.sin, torch.cos, (h,))


@pytest.mark.smoke
def test_a_condition_trains() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.choice, self.last = nn.Linear(8, 8), Choice(), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.choice(x, self.layer(x)))

    model = Model()
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", loss_fn=lambda out: out.square().mean())
    for sign in (1, -1):
        x = sign * torch.rand(4, 8)
        pipe.step(x)
        mine = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        sum(model(part).square().mean() / 2 for part in x.chunk(2)).backward()
        torch.testing.assert_close(mine, [p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)


def test_functions_with_tensors_in_their_closures_are_in_a_statement_kept_whole() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        return torch.cond(x.mean() > 0, lambda x: x.sin() + h, lambda x: x.cos() - h, (x,))

    model = Body(body)
    graph = pc.trace(model, torch.randn(4, 4))
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        assert torch.equal(graph(x), model(x))


def test_functions_with_tensors_in_their_closures_are_refused_where_nothing_can_be_kept() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, lambda y: y.sin() + x, lambda y: y.cos() - x, (x,))

    found = pc.explain(Body(body), torch.randn(4, 4))
    assert [failure.code for failure in found.failures] == ["PC115"]
