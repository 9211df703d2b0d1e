"""Calls in the forward of the whole model whose results only the data decide: kept as nodes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bodies import Body
from torch import nn

import pipecompile as pc


def masked(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    picked = m.b(h[mask]).relu()
    rows = mask.nonzero()[:, 0]
    return picked.square().mean() + m.c(h)[rows].mean() * torch.masked_select(h, mask[:, None]).mean()


def in_a_loop(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for layer in (m.a, m.b, m.c):
        total = total + layer(x)[mask].sum()
    return total


def zeros_filled(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = m.a(x)[mask]
    out = torch.zeros(x.shape[0], rows.shape[1])
    return m.c(out.masked_scatter(mask[:, None], m.b(rows) * rows.shape[0]))


def inputs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    mask = torch.rand(size, generator=generator) > 0.5
    mask[0] = True
    return torch.randn(size, 4, generator=generator), mask


@pytest.mark.parametrize("body", [masked, in_a_loop, zeros_filled])
def test_rows_that_a_mask_picks(body: Any) -> None:
    torch.manual_seed(0)
    model = Body(body)
    graph = pc.trace(model, *inputs(4))
    assert {reason.piece.line.split(" in ")[1] for reason in graph.facts.kept} == {body.__qualname__}
    for size in (4, 3, 9):
        assert torch.equal(graph(*inputs(size)), model(*inputs(size)))


class Words(nn.Module):
    """Packs its sequences in the forward of the whole model, as many recurrent models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        out, (last, _) = self.rnn(packed)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=words.shape[1])
        return self.head(out.sum(1)), self.head(last[-1])


def test_packed_sequences_train() -> None:
    torch.manual_seed(0)
    model = Words()

    def loss_fn(out: Any) -> torch.Tensor:
        return out[0].square().mean() + out[1].square().mean()

    pipe = pc.compile(model, 3, n_microbatches=2, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 3)
    for _ in range(2):
        words, lengths = torch.randint(0, 20, (6, 5)), torch.randint(1, 6, (6,))
        pipe.step(words, lengths)
        mine = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        for part, length in zip(words.chunk(2), lengths.chunk(2), strict=True):
            (loss_fn(model(part, length)) / 2).backward()
        torch.testing.assert_close(mine, [p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)


def test_an_operator_that_torch_has_no_shapes_for() -> None:
    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 2)
            self.register_buffer("graph", torch.eye(5).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.sparse.mm(self.graph, self.a(x).T).T)

    model = Neighbours()
    graph = pc.trace(model, torch.randn(4, 5))
    x = torch.randn(3, 5)
    torch.testing.assert_close(graph(x), model(x))
    pc.compile(model, 2, n_microbatches=2, loss_fn=lambda out: out.square().mean(), cost="analytic").step(x)


def test_what_python_decides_on_such_rows_is_decided_in_every_run() -> None:
    """It was refused, in the run in which it was decided otherwise."""

    def decides(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = m.a(x)[mask]
        return m.b(rows).sum() if len(rows) > 2 else m.c(rows).sum()

    model = Body(decides)
    graph = pc.trace(model, *inputs(9))
    x, _ = inputs(9)
    for count in (0, 1, 2, 3, 9):
        assert torch.equal(graph(x, torch.arange(9) < count), model(x, torch.arange(9) < count))


def test_an_error_of_the_model_is_no_reason_to_keep_a_call() -> None:
    """A mask per pair, which one sample alone broadcasts over, is not cut into samples."""

    def body(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(m.a(x), x, x, attn_mask=mask)

    found = pc.explain(Body(body), torch.randn(1, 4, 4), torch.ones(1, 4).bool())
    assert not found.traced


def test_sizes_that_agree_with_the_batch_by_chance_are_the_data_s() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.a(x)[x[:, 0] > 0].sum(0)

    graph = pc.trace(Body(body), torch.ones(4, 4))
    x = torch.tensor([1.0, -1.0, 1.0])[:, None].repeat(1, 4)
    assert torch.equal(graph(x), body(graph, x))
