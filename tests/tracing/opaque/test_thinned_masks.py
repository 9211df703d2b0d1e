"""Sizes that the data decide are unknown although no trial input has padding; sizes by constant masks are known."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing.opaque.saved_bytes import memory_key
from pipecompile.tracing.opaque.thinned_masks import MaskThinning

INDEX, NONZERO, UNIQUE = torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default, torch.ops.aten._unique2.default


def test_masks_of_the_inputs_are_thinned_in_one_way_and_others_stay() -> None:
    rows, mask, constant = torch.randn(6, 2), torch.ones(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)
    thinning = MaskThinning([rows, mask], is_active=True)
    _, (thinned,) = thinning.arguments(INDEX, (rows, [mask]))
    assert thinned.tolist() == [True] * 4 + [False] * 2
    assert thinning.arguments(NONZERO, (mask,))[0].tolist() == thinned.tolist()
    assert thinning.arguments(INDEX, (rows, [constant]))[1][0] is constant
    assert thinning.arguments(UNIQUE, (rows, True))[0].unique().numel() == 1
    assert not thinning.decides(INDEX, (rows, [constant]))
    thinning.note(torch.ops.aten.logical_not.default, [mask], [constant])
    assert thinning.decides(INDEX, (rows, [constant]))
    like = torch.ones_like(mask)
    thinning.note(torch.ops.aten.ones_like.default, [mask], [like])
    assert not thinning.decides(INDEX, (rows, [like]))
    assert memory_key(mask) != memory_key(like)


def test_nothing_is_thinned_in_other_runs() -> None:
    rows, mask = torch.randn(6, 2), torch.ones(6, dtype=torch.bool)
    thinning = MaskThinning([rows, mask], is_active=False)
    assert thinning.decides(INDEX, (rows, [mask]))
    assert thinning.arguments(INDEX, (rows, [mask]))[1][0] is mask


class Selecting(nn.Module):
    """Computes a loss of the targets that are not padding, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.kind, self.select = kind, Select()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.mid(self.table(x)).tanh())
        mask = y != -1
        if self.kind == "index":
            return F.cross_entropy(logits[mask], y[mask])
        if self.kind == "masked_select":
            return torch.masked_select(logits, mask[..., None]).square().mean()
        if self.kind == "nonzero":
            return logits.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)].square().mean()
        return self.select(logits, mask).square().mean()


class Select(nn.Module):
    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return rows[mask]


def batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.randint(0, 20, (4, 12))
    y[torch.arange(12) >= torch.tensor(lengths)[:, None]] = -1
    return torch.randint(0, 50, (4, 12)), y


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("kind", ["index", "masked_select", "nonzero", "module"])
def test_a_model_compiled_on_an_example_without_padding_takes_padding(kind: str) -> None:
    torch.manual_seed(0)
    model = Selecting(kind)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, example_args=batch(12, 12, 12, 12), n_microbatches=2, cost="analytic", check=False)
    for lengths in ((12, 12, 12, 12), (12, 7, 6, 5), (3, 1, 12, 12)):
        x, y = batch(*lengths)
        pipe.zero_grad()
        pipe.step(x, y)
        eager.zero_grad()
        for one, other in zip(x.chunk(2), y.chunk(2), strict=True):
            (eager(one, other) / 2).backward()
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


class Pairs(nn.Module):
    """Selects by a triangle that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(6, 1)
        self.register_buffer("triangle", torch.ones(4, 4).triu(1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last((h[:, :, None] * h[:, None])[:, self.triangle])


def test_a_constant_mask_selects_a_known_number() -> None:
    pipe = pc.compile(Pairs(), 2, example_args=(torch.randn(4, 4),), n_microbatches=2, cost="analytic",
                      loss_fn=lambda y: y.square().mean())  # fmt: skip
    assert torch.isfinite(pipe.step(torch.randn(6, 4)))
