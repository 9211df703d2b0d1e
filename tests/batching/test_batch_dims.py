"""Mini-batches as real models take them: masks that all share, batches in dimension 1, nested inputs, targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import assert_same, square_loss


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return self.head(self.norm(h))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor, tgt_mask: torch.Tensor) -> torch.Tensor:
        return self.body(src, tgt, tgt_mask=tgt_mask)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        out, state = self.rnn(self.first(x), state)
        return {"scores": self.last(out), "state": state}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, batch: Mapping[str, Any], *more: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        x, (bias, table) = batch["x"], batch["rest"]
        h = self.a(x + bias) * scale + table.sum()
        return self.b(h), h + sum(m.sum(1, keepdim=True) for m in more)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    whole: Callable[[int], Any]
    part: Callable[[Any, slice], Any]
    batch_dims: dict[str, int | None]


CASES = {
    "a mask that all share": Case(
        Masked,
        lambda n: {"x": torch.randn(n, 5, 6), "mask": torch.ones(5, 5).tril().bool()},
        lambda i, s: i | {"x": i["x"][s]},
        {"mask": None},
    ),
    "a square mask as long as the batch": Case(
        Masked,
        lambda n: {"x": torch.randn(n, n, 6), "mask": torch.ones(n, n).tril().bool()},
        lambda i, s: i | {"x": i["x"][s]},
        {"mask": None},
    ),
    "a mask of one sample is shared without a word": Case(
        Masked,
        lambda n: {"x": torch.randn(n, 5, 6), "mask": torch.ones(1, 5, 5).tril().bool()},
        lambda i, s: i | {"x": i["x"][s]},
        {},
    ),
    "the batch in dimension 1": Case(
        Seq2Seq,
        lambda n: {"src": torch.randn(4, n, 8), "tgt": torch.randn(3, n, 8), "tgt_mask": torch.ones(3, 3).triu(1).bool()},
        lambda i, s: i | {"src": i["src"][:, s], "tgt": i["tgt"][:, s]},
        {"src": 1, "tgt": -2, "tgt_mask": None},
    ),
    "a recurrent network with its state": Case(
        Recurrent,
        lambda n: {"x": torch.randn(4, n, 6), "state": (torch.randn(1, n, 8), torch.randn(1, n, 8))},
        lambda i, s: {"x": i["x"][:, s], "state": tuple(t[:, s] for t in i["state"])},
        {"x": 1, "state": 1},
    ),
    "leaves by their own names": Case(
        Nested,
        lambda n: {"batch": {"x": torch.randn(n, 6), "rest": [torch.randn(6), torch.randn(3, 2)]}, "scale": 0.5},
        lambda i, s: i | {"batch": i["batch"] | {"x": i["batch"]["x"][s]}},
        {"batch_rest_0": None, "batch_rest_1": None},
    ),
    "a leaf wins over its argument": Case(
        Nested,
        lambda n: {"batch": {"x": torch.randn(n, 6), "rest": [torch.randn(6), torch.tensor(2.0)]}},
        lambda i, s: i | {"batch": i["batch"] | {"x": i["batch"]["x"][s]}},
        {"batch": None, "batch_x": 0},
    ),
}  # fmt: skip


def joined(parts: list[Any], like: Any) -> Any:
    if isinstance(like, dict):
        return {key: joined([part[key] for part in parts], like[key]) for key in like}
    if isinstance(like, (tuple, list)):
        return tuple(joined([part[i] for part in parts], like[i]) for i in range(len(like)))
    dim = next((d for d in range(like.dim()) if parts[0].shape[d] != like.shape[d]), 0)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def loop(case: Case, model: nn.Module, inputs: Any, samples: int, count: int) -> tuple[Any, torch.Tensor]:
    total, outputs = torch.tensor(0.0), []
    for chunk in torch.arange(samples).tensor_split(min(count, samples)):
        out = model(**case.part(inputs, slice(int(chunk[0]), int(chunk[-1]) + 1)))
        loss = square_loss(out) * (len(chunk) / samples)
        loss.backward()
        total, outputs = total + loss.detach(), [*outputs, out]
    return joined(outputs, model(**inputs)), total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_and_a_call_equal_the_loop_over_the_same_parts(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model()
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 2, n_microbatches=3, batch_dims=case.batch_dims
    )  # fmt: skip
    for samples in (7, 1):
        inputs = case.whole(samples)
        expected, loss = loop(case, eager, inputs, samples, 3)
        torch.testing.assert_close(pipe.step(**inputs), loss, rtol=1e-6, atol=0)
        assert_same(model, eager, tolerance=1e-5)
        torch.testing.assert_close(pipe(**inputs), expected)


def test_gradients_of_inputs_are_gathered_along_their_batch_dimensions() -> None:
    torch.manual_seed(0)
    model, case = Recurrent(), CASES["a recurrent network with its state"]
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2, loss_fn=square_loss, batch_dims=case.batch_dims
    )  # fmt: skip
    inputs = case.whole(5)
    x, h, c = (t.requires_grad_() for t in (inputs["x"], *inputs["state"]))
    square_loss(pipe(x, (h, c))).backward()
    mine = [t.grad for t in (x, h, c)]
    for t in (x, h, c):
        t.grad = None
    square_loss(model(x, (h, c))).backward()
    for ours, theirs in zip(mine, (x, h, c), strict=True):
        torch.testing.assert_close(ours, theirs.grad)
        theirs.grad = None
    pipe.step(x, (h, c))
    for t, width in ((x, 6), (h, 8), (c, 8)):
        assert t.grad is not None
        assert t.grad.shape == (t.shape[0], 5, width)


def test_a_shared_input_gets_the_sum_of_all_gradients() -> None:
    torch.manual_seed(0)
    model = Nested()
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3, loss_fn=square_loss,
        batch_dims={"batch_rest": None},
    )  # fmt: skip
    x, bias, table = torch.randn(7, 6), torch.randn(6, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    square_loss(pipe({"x": x, "rest": [bias, table]})).backward()
    mine = [bias.grad, table.grad]
    bias.grad = table.grad = None
    square_loss(model({"x": x, "rest": [bias, table]})).backward()
    torch.testing.assert_close(mine, [bias.grad, table.grad])


def test_targets_have_batch_dimensions_too() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    eager = copy.deepcopy(model)

    def loss_fn(out: Any, target: Any) -> torch.Tensor:
        return F.cross_entropy(out["scores"].flatten(0, 1), target["label"].flatten(), weight=target["weight"])

    case = CASES["a recurrent network with its state"]
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2, loss_fn=loss_fn,
        batch_dims=case.batch_dims | {"target": 1, "target_weight": None},
    )  # fmt: skip
    inputs, target = case.whole(4), {"label": torch.randint(0, 3, (4, 4)), "weight": torch.ones(3)}
    loss_fn(eager(**inputs), target).backward()
    pipe.step(**inputs, target=target)
    assert_same(model, eager, tolerance=1e-5)


def told(call: Callable[[], object]) -> str:
    with pytest.raises(pc.InputError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "args, line",
    [
        ((torch.randn(8, 5, 6), torch.ones(5, 5)), 'batch_dims={"mask": None} for what all samples share'),
        ((torch.randn(8, 5, 6), torch.ones(5, 8)), 'batch_dims={"mask": 1} for another batch dimension'),
        ((torch.randn(4, 8, 6), torch.randn(3, 8, 6)), 'batch_dims={"x": 1, "mask": 1} for another batch dimension'),
        (
            (torch.randn(4, 8, 6), torch.randn(64, 3)),
            '; split={"mask": lambda rows, samples: rows.split([16 * n for n in samples])} if the rows of mask belong to samples',
        ),
        ((torch.randn(4, 8, 6), torch.randn(7, 3)), '; split={"mask": function} if the rows of mask belong to samples'),
    ],
)
def test_a_disagreement_names_the_option_to_paste(args: tuple[torch.Tensor, ...], line: str) -> None:
    assert line in told(lambda: pc.trace(Masked(), *args))


@pytest.mark.parametrize("count", [2, 4])
def test_a_mask_as_long_as_the_batch_is_refused_unless_batch_dims_names_it(count: int) -> None:
    pipe = pc.compile(Masked(), 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=count)
    with pytest.raises(pc.TraceError, match=r'or batch_dims={"mask": None}, if all samples share it'):
        pipe(torch.randn(4, 4, 6), torch.ones(4, 4).tril().bool())


def test_weights_of_samples_with_a_sum() -> None:
    torch.manual_seed(0)
    model = Masked()
    eager = copy.deepcopy(model)

    def loss_fn(out: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        each = (out - target["y"]).square().mean((1, 2))
        return (each * target["weight"]).sum() / target["total"]

    weight = torch.rand(7)
    x, target = torch.randn(7, 5, 6), {"y": torch.randn(7, 5, 6), "weight": weight, "total": weight.sum()}
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3, loss_fn=loss_fn, loss_reduction="sum"
    )
    whole = loss_fn(eager(x), target)
    whole.backward()
    torch.testing.assert_close(pipe.step(x, target=target), whole.detach())
    assert_same(model, eager, tolerance=1e-5)


def test_invalid_batch_dims_are_refused() -> None:
    x = torch.randn(4, 5, 6)
    assert "is not a parameter of forward" in told(lambda: pc.compile(Masked(), 2, batch_dims={"maks": None}))
    assert "'mask'] is True" in told(lambda: pc.compile(Masked(), 2, batch_dims={"mask": True}))
    assert "not a mapping" in told(lambda: pc.trace(Masked(), x, batch_dims=1))  # type: ignore[arg-type]
    assert "x has no dimension 3" in told(lambda: pc.trace(Masked(), x, batch_dims={"x": 3}))
    assert "the batch is empty" in told(lambda: pc.trace(Masked(), x[:0]))


class OwnKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, batch_dims: int = 0) -> torch.Tensor:
        return self.a(x).sum(batch_dims)


def test_a_model_with_a_keyword_of_that_name_gets_it() -> None:
    x = torch.randn(2, 4, 3)
    graph = pc.trace(OwnKeyword(), x, batch_dims=1)  # type: ignore[arg-type]
    assert graph(x, 1).shape == (2, 3)
