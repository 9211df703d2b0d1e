"""Packed sequences in micro-batches: step and pipe(x) equal eager on the whole mini-batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError, RecordingWarning

LENGTHS = (4, 2, 7, 1, 5, 3, 6)


class Packed(nn.Module):
    """Attention within the sequences that offsets pack into one row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.out, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 5)  # fmt: skip

    def forward(self, ids: torch.Tensor, cu: torch.Tensor, keep: str = "rows") -> Any:
        h = self.table(ids)
        sequence = torch.bucketize(torch.arange(len(ids)), cu[1:], right=True)
        q, k, v = self.mixed(h).chunk(3, -1)
        scores = (q @ k.T).masked_fill(sequence[:, None] != sequence, -torch.inf)
        y = self.head(h + self.out(scores.softmax(-1) @ v))
        return {"rows": y, "sum": y.sum(0), "all": scores}[keep]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (sum(LENGTHS),), generator=generator)
    labels = torch.randint(5, ids.shape, generator=generator)
    labels[::3] = -100
    return ids, torch.tensor((0, *LENGTHS)).cumsum(0).int(), labels


def models(**options: Any) -> tuple[pc.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = Packed()
    usual = {"devices": ["cpu"] * 2, "n_microbatches": 3, "loss_fn": F.cross_entropy, "cost": "analytic"}
    usual |= {"split": {"cu": "offsets"}}
    return pc.compile(model, 2, **(usual | options)), copy.deepcopy(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_step_and_call_equal_eager_on_the_whole(dispatch: str) -> None:
    pipe, plain = models(dispatch=dispatch)
    ids, cu, labels = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        loss = pipe.step(ids, cu, target=labels)
        output = pipe(ids, cu=cu)
    expected = F.cross_entropy(plain(ids, cu), labels)
    expected.backward()
    assert pipe.program.n_microbatches == 3
    torch.testing.assert_close(loss, expected.detach())
    for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    pipe.zero_grad()
    plain.zero_grad()
    torch.testing.assert_close(output, plain(ids, cu))
    output.square().sum().backward()
    plain(ids, cu).square().sum().backward()
    for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert pipe.evaluate([(ids, cu, labels)]).loss == pytest.approx(float(loss), rel=1e-5)


def test_an_output_without_rows_of_tokens() -> None:
    ids, cu, _ = batch()
    pipe, _ = models()
    with torch.no_grad(), pytest.raises(InputError, match="cannot be put together"):
        pipe(ids, cu, keep="all")
    one, plain = models(n_microbatches=1)
    with torch.no_grad():
        torch.testing.assert_close(one(ids, cu, keep="all"), plain(ids, cu, keep="all"))


def test_a_batch_with_fewer_sequences_goes_into_fewer_micro_batches() -> None:
    pipe, plain = models(example_args=batch()[:2])
    ids, labels = torch.arange(9), torch.zeros(9, dtype=torch.long)
    cu = torch.tensor([0, 4, 9]).int()
    torch.testing.assert_close(pipe.step(ids, cu, target=labels), F.cross_entropy(plain(ids, cu), labels).detach())
    assert pipe.program.n_microbatches == 2


def test_offsets_without_a_split_are_refused_with_the_way() -> None:
    ids, cu, labels = batch()
    pipe, _ = models(split=None)
    with pytest.raises(InputError, match=r'split=\{"cu": "offsets"\}'):
        pipe.step(ids, cu, target=labels)
    shared, _ = models(split=None, batch_dims={"cu": None})
    with pytest.warns(RecordingWarning, match="is the same in all micro-batches, which have parts of the sequences"):
        shared.step(ids, cu, target=labels)


def test_a_split_of_no_argument() -> None:
    with pytest.raises(InputError, match="split names 'cu_seqlens', which is not a parameter of forward"):
        models(split={"cu_seqlens": "offsets"})
