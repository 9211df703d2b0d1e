"""Taking a mini-batch apart and putting outputs together are each other's inverse."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatches import (
    LossDivisor,
    loss_gradients,
    loss_weights,
    scatter,
    scatter_tree,
    sizes,
    split_sizes,
    weighted_loss,
)
from pipecompile.errors import InputError


@given(st.integers(1, 60), st.integers(1, 12))
def test_sizes_are_those_of_tensor_split(samples: int, count: int) -> None:
    count = min(samples, count)
    assert sizes(samples, count) == tuple(len(part) for part in torch.arange(samples).tensor_split(count))


@pytest.mark.parametrize(
    ("samples", "count", "expected", "of_lists"),
    [
        (8, 4, (2, 2, 2, 2), (2, 2, 2, 2)),
        (7, 4, (2, 2, 2, 1), (7,)),
        (9, 4, (3, 2, 2, 2), (3, 3, 3)),
        (3, 4, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_there_are_as_many_micro_batches_as_asked_for_or_as_samples(
    samples: int, count: int, expected: tuple[int, ...], of_lists: tuple[int, ...]
) -> None:
    def forward(x: object, texts: object = None) -> None: ...

    x = torch.zeros(samples, 4)
    assert split_sizes(flatten(forward, (x,), {}, {}), count) == expected
    assert split_sizes(flatten(forward, (x,), {"texts": [*range(samples)]}, {"texts": list}), count) == of_lists


def test_a_leaf_without_batch_dimension_is_shared() -> None:
    assert scatter(None, None, 3) == (None, None, None)
    assert scatter(torch.tensor(2.0), None, 2) == (torch.tensor(2.0), torch.tensor(2.0))


def test_nested_targets() -> None:
    target = {"a": torch.arange(5), "b": [torch.arange(10).reshape(5, 2), "word"]}
    first, second = scatter_tree(target, 2, 5, {})
    assert first["a"].tolist() == [0, 1, 2]
    assert second["b"][0].tolist() == [[6, 7], [8, 9]]
    assert second["b"][1] == "word"
    with pytest.raises(InputError, match="target_a: 4, inputs: 5"):
        scatter_tree({"a": torch.arange(4)}, 2, 5, {})


class Padded(nn.Module):
    """Writes into its tokens, as models of translation do with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens.masked_fill_(tokens == 8, 0)
        return self.head(self.body(self.embedding(tokens)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_model_may_write_into_its_micro_batch_while_others_wait(schedule: str) -> None:
    model, tokens = Padded(), torch.arange(24).view(8, 3) % 9
    eager = copy.deepcopy(model)
    mine = tokens.clone()
    pipe = pc.compile(
        model, 3, n_microbatches=4, schedule=schedule, cost="analytic", devices=["cpu"] * 3,
        loss_fn=lambda out: out.square().mean(),
    )  # fmt: skip
    pipe.step(mine)
    for part in tokens.tensor_split(4):
        (eager(part).square().mean() / 4).backward()
    assert torch.equal(mine, tokens)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_are_added_bit_for_bit_as_in_a_loop(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(20):
        losses = [torch.rand((), generator=generator).to(dtype) for _ in range(count)]
        expected = losses[0] * (1 / count)
        for loss in losses[1:]:
            expected = expected + loss * (1 / count)
        assert torch.equal(weighted_loss(losses, [1 / count] * count), expected)


def test_gradients_of_losses_go_to_a_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each micro-batch's went up by itself, 8 bytes at a time."""
    copies: list[torch.Size] = []
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, device: torch.device, **options: bool) -> torch.Tensor:
        copies.append(tensor.shape)
        return move(tensor, device, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    gradients = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    found = loss_gradients(gradients, [0.5, 0.0, 0.5], torch.device("meta"))
    assert copies == [torch.Size([3])]
    assert [None if one is None else one.device.type for one in found] == ["meta", None, "meta"]
    own = loss_gradients(gradients, [0.5, 0.0, 0.5], torch.device("cpu"))
    assert [one is None for one in own] == [False, True, False]
    assert own[0] is not None
    assert own[0].data_ptr() != gradients.data_ptr()


@pytest.mark.parametrize(
    ("parts", "dtype"), [((2, 2, 2, 2), torch.float32), ((3, 1), torch.float32), ((2, 2, 2), torch.float64)]
)
def test_weights_are_in_single_precision_only_where_it_has_them_exactly(
    parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Autograd casts a gradient to the dtype of the loss: a third in float32 would be another number for a loss in float64."""
    weights, tensor = loss_weights(parts, mean=True)
    assert tensor.dtype is dtype
    assert tensor.double().tolist() == weights == [size / sum(parts) for size in parts]


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 4.0])])
def test_the_shares_of_all_microbatches_are_one_wait_for_a_gpu(
    weight: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch was a wait of the host, if the target was on a GPU."""
    labels, to_host = torch.tensor([0, -100, 1, 2, -100, -100]), torch.Tensor.cpu
    read = list[torch.Size]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: read.append(self.shape) or to_host(self))
    divisor = LossDivisor(("t",), is_target=True, weight=weight)
    shares, tensor = divisor.shares({"t": labels}, [{"t": part} for part in labels.split(2)], (2, 2, 2))
    assert shares == tensor.tolist() == pytest.approx([1 / 3, 2 / 3, 0] if weight is None else [1 / 7, 6 / 7, 0])
    assert read == [(4,)]


def test_a_target_on_a_gpu_is_not_read_before_its_shares() -> None:
    """Whether all of it counts was one more wait; shares are then those of the samples, bit for bit."""
    divisor, labels = LossDivisor(("t",), is_target=True), torch.zeros(9, 7, dtype=torch.int64)
    assert divisor.is_complete({"t": labels})
    assert not divisor.is_complete({"t": labels.to("meta")})
    parts = (4, 3, 2)
    shares, _ = divisor.shares({"t": labels}, [{"t": part} for part in labels.split(parts)], parts)
    assert shares == loss_weights(parts, mean=True)[0]
