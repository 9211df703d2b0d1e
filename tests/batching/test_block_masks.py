"""Block masks are cut by the batch, with the tensors that their functions close over; a pipeline equals eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

import pipecompile as pc
from pipecompile.batching.block_masks import batch_use
from pipecompile.batching.call_inputs import flatten
from pipecompile.errors import InputError

SAMPLES, LENGTH = 4, 16
DOCUMENTS = torch.randint(0, 3, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)).sort(1).values
Mod = Callable[..., torch.Tensor]


def causal(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def by_document(documents: torch.Tensor) -> Mod:
    return lambda b, _h, q, k: documents[b, q] == documents[b, k]


def by_table(table: torch.Tensor, least: int) -> Mod:
    return lambda _b, _h, q, k: table[q, k] > least


def by_number(b: torch.Tensor, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= k) & (b > 0)


def by_global(b: torch.Tensor, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def masked(mod: Mod, samples: int | None = SAMPLES) -> BlockMask:
    return create_block_mask(mod, samples, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)


class Attention(nn.Module):
    """With `dense`, the mask is written out, and the model trains on a CPU."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.table, self.mixed, self.head, self.dense = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 5), dense

    def forward(self, ids: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        count, length = ids.shape
        parts = self.mixed(self.table(ids)).chunk(3, -1)
        q, k, v = (part.view(count, length, 2, 8).transpose(1, 2) for part in parts)
        if self.dense:
            b, h, row, column = torch.arange(count).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1).long(), *grid(length)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.mask_mod(b, h, row, column))
        else:
            y = flex_attention(q, k, v, block_mask=mask)
        return self.head(y.transpose(1, 2).flatten(2)).mT


def grid(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(length)
    return places.view(1, 1, -1, 1), places.view(1, 1, 1, -1)


def models(*, dense: bool) -> tuple[pc.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = Attention(dense=dense)
    options: dict[str, Any] = {"n_microbatches": 2, "loss_fn": F.cross_entropy, "cost": "analytic"}
    return pc.compile(model, 2, devices=["cpu"] * 2, **options), copy.deepcopy(model)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(20, (SAMPLES, LENGTH)), torch.randint(5, (SAMPLES, LENGTH))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_equals_eager_and_a_new_mask_needs_no_new_recording() -> None:
    pipe, plain = models(dense=False)
    pipe.eval()
    plain.eval()
    ids, _ = batch()
    with torch.no_grad():
        for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
            mask = masked(and_masks(causal, by_document(documents)))
            torch.testing.assert_close(pipe(ids, mask), plain(ids, mask))
        assert len(pipe.explain().kept) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mod", "samples"),
    [(by_document(DOCUMENTS), SAMPLES), (by_document(DOCUMENTS), None), (causal, None),
     (and_masks(causal, by_table(torch.arange(256.0).view(16, 16), 40)), None)],
    ids=["documents", "documents in shared blocks", "shared", "a shared table"],
)  # fmt: skip
def test_training_equals_eager(mod: Mod, samples: int | None) -> None:
    pipe, plain = models(dense=True)
    mask = masked(mod, samples)
    ids, labels = batch()
    loss, expected = pipe.step(ids, mask, target=labels), F.cross_entropy(plain(ids, mask), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(pipe(ids, mask), plain(ids, mask))


@pytest.mark.parametrize(
    ("mod", "where"),
    [(by_number, "in by_number"), (by_global, "in by_global, from a tensor that it does not close over")],
)
def test_another_use_of_the_batch_index_is_refused_at_its_line(mod: Mod, where: str) -> None:
    pipe, plain = models(dense=True)
    ids, labels = batch()
    with pytest.raises(InputError, match=rf"(?s)the BlockMask cannot be cut.*{where}"):
        pipe.step(ids, masked(mod), target=labels)
    mask = masked(mod)  # micro-batches that are not cut have a batch index of their own
    listed = [{"ids": ids, "mask": mask, "target": labels}] * 2
    torch.testing.assert_close(pipe.step(microbatches=listed), F.cross_entropy(plain(ids, mask), labels).detach())


def test_the_batch_index_selects_from_closures() -> None:
    table = torch.zeros(4, 4)
    assert batch_use(lambda b, h, q, k: table[b, q] > table[b][k])[0].keys() == {id(table)}
    assert batch_use(lambda b, h, q, k: table[q, k] > 0) == ({}, "")
    for other in (lambda b, h, q, k: table[q, b], lambda b, h, q, k: table[b + 1], lambda b, h, q, k: table[b, b]):
        assert "test_block_masks.py" in batch_use(other)[1]
    assert "raises" in batch_use(lambda b, h, q, k: table[q, k, 0, 0, 0])[1]


def test_dimensions_and_structure_of_a_mask() -> None:
    def forward(x: torch.Tensor, mask: BlockMask) -> None: ...

    x, table = torch.zeros(SAMPLES, 2), torch.zeros(LENGTH, LENGTH)
    one = flatten(forward, (x, masked(and_masks(by_document(DOCUMENTS), by_table(table, 3)))), {})
    dims = {name: dim for name, dim in zip(one.names, one.dims, strict=True) if "mask_mod" in name}
    assert [dim for name, dim in dims.items() if name.endswith("_documents")] == [0]
    assert [dim for name, dim in dims.items() if name.endswith("_table")] == [None]
    other = flatten(forward, (x, masked(and_masks(by_document(DOCUMENTS + 1), by_table(table, 3)))), {})
    assert one.spec == other.spec
    third = flatten(forward, (x, masked(and_masks(by_table(table, 3), by_document(DOCUMENTS)))), {})
    assert one.spec != third.spec
