"""Outputs of many forms, each put together from micro-batches and compared with eager's on the mini-batch.

    python benchmarks/output_forms.py [--only flipped] [--markdown benchmarks/results/output_forms.md]

Every form is a function of a (batch, 6) activation. A call counts as right if values, types, structure and gradients are eager's, as
refused if it raises a PipecompileError, as warned if it differs and a warning names the line; else it is silently different.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import pipecompile as pc

Ends = Callable[[torch.Tensor], Any]

torch.set_default_dtype(torch.float64)  # so that no rounding looks like a difference

COUNTS = (2, 3, 4, 5)
"""Numbers of micro-batches."""


@dataclass
class Scores:
    """A dataclass as an output."""

    logits: torch.Tensor
    loss: torch.Tensor
    best: torch.Tensor


pytree.register_dataclass(Scores)


def ratio(y: torch.Tensor) -> torch.Tensor:
    chosen = (y > 0).float()
    return (y * chosen).sum() / chosen.sum().clamp(min=1)


def standardised(y: torch.Tensor) -> torch.Tensor:
    return (y - y.mean(0)) / (y.std(0) + 1e-5)


def normalised_by_norm(y: torch.Tensor) -> torch.Tensor:
    return y / y.norm()


def contrastive(y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(y, dim=1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))


def filled(y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(y)
    out[1:] = y[:-1]
    return out


def last_tokens(y: torch.Tensor) -> torch.Tensor:
    tokens = y.view(len(y), 2, 3)
    return tokens[torch.arange(len(y)), (y[:, 0] > 0).long()]


def running(y: torch.Tensor) -> torch.Tensor:
    total, rows = torch.zeros(6), []
    for row in (y[0], y[1]):
        total = total * 0.5 + row
        rows.append(total)
    return torch.stack(rows)


FORMS: dict[str, Ends] = {
    # rows
    "rows": lambda y: y,
    "rows, batch in dimension 1": lambda y: y.T,
    "rows, batch in dimension 2": lambda y: y.view(-1, 2, 3).permute(1, 2, 0),
    "two rows each": lambda y: y.view(len(y), 2, 3).flatten(0, 1),
    "six numbers each": lambda y: y.flatten(),
    "(batch * tokens, classes)": lambda y: y.view(-1, 3).softmax(-1),
    "one number each": lambda y: y.mean(1),
    "chosen token each": last_tokens,
    "stacked with itself": lambda y: torch.stack([y, 2 * y], 1),
    "stacked in front": lambda y: torch.stack([y, 2 * y]),
    "indexed by the number of the row": lambda y: y[torch.arange(len(y)), y.argmax(1)],
    "padded": lambda y: F.pad(y, (1, 2)),
    "masked to zero": lambda y: y.masked_fill(y > 0, 0.0),
    "one-hot of the best": lambda y: F.one_hot(y.argmax(1), 6),
    # rows in another order, or not all of them
    "flipped": lambda y: y.flip(0),
    "rolled": lambda y: y.roll(1, 0),
    "sorted by a score": lambda y: y[y[:, 0].argsort()],
    "sorted columns": lambda y: y.sort(0).values,
    "order of a score": lambda y: y[:, 0].argsort(descending=True),
    "shuffled by a fixed order": lambda y: y[torch.arange(len(y) - 1, -1, -1)],
    "first two rows": lambda y: y[:2],
    "all but the first row": lambda y: y[1:],
    "all but the last row": lambda y: y[:-1],
    "every second row": lambda y: y[::2],
    "first row": lambda y: y[0],
    "last row": lambda y: y[-1],
    "last two rows": lambda y: y[-2:],
    "first half": lambda y: y[: len(y) // 2],
    "blocks": lambda y: torch.cat([y, -y]),
    "repeated": lambda y: y.repeat(2, 1),
    "repeated by sample": lambda y: y.repeat_interleave(2, 0),
    "one row more": lambda y: torch.cat([y, torch.ones(1, 6)]),
    "transposed and flattened": lambda y: y.T.reshape(-1),
    "shifted by one row": filled,
    "differences of rows": lambda y: y.diff(dim=0),
    "rows of a mask": lambda y: y[y[:, 0] > 0],
    "numbers of a mask": lambda y: y[y > 0],
    "masked_select": lambda y: y.masked_select(y > 0),
    "nonzero": lambda y: (y > 0).nonzero(),
    "unique": lambda y: y.argmax(1).unique(),
    "chunk of the batch": lambda y: y.chunk(2)[0],
    # reductions over the batch
    "sum": lambda y: y.square().sum(),
    "sum of each feature": lambda y: y.sum(0),
    "mean": lambda y: y.mean(),
    "mean of each feature": lambda y: y.square().mean(0),
    "mean by hand": lambda y: y.sum() / len(y),
    "mean of rows divided by the batch size": lambda y: (y.square().sum(1) / len(y)).sum(),
    "mean of sums": lambda y: y.square().sum(1).mean(),
    "sum of means": lambda y: y.square().mean(1).sum(),
    "mean plus a constant": lambda y: y.mean() + 1.0,
    "sum plus a constant": lambda y: y.sum() + 1.0,
    "square of a sum": lambda y: y.sum() ** 2,
    "root of a mean": lambda y: y.square().mean().sqrt(),
    "logarithm of a mean": lambda y: y.exp().mean().log(),
    "max": lambda y: y.max(),
    "max of each feature": lambda y: y.max(0).values,
    "max of a mean": lambda y: y.mean(0).max(),
    "min": lambda y: y.amin(),
    "min of each feature": lambda y: y.amin(0),
    "any": lambda y: (y > 0.5).any(),
    "all": lambda y: (y > -9).all(0),
    "product": lambda y: y.square().add(0.5).prod(0),
    "logsumexp": lambda y: y.logsumexp(0),
    "norm": lambda y: y.norm(),
    "norm of each feature": lambda y: y.norm(dim=0),
    "infinity norm": lambda y: torch.linalg.vector_norm(y, float("inf")),
    "median": lambda y: y.median(),
    "median of each feature": lambda y: y.median(0).values,
    "quantile": lambda y: y.quantile(0.3, dim=0),
    "std": lambda y: y.std(),
    "std of each feature": lambda y: y.std(0),
    "var, biased": lambda y: y.var(0, unbiased=False),
    "var_mean": lambda y: torch.var_mean(y, 0),
    "argmax of the batch": lambda y: y[:, 0].argmax(),
    "argmax of each feature": lambda y: y.argmax(0),
    "mode": lambda y: y.argmax(1).mode().values,
    "count": lambda y: (y > 0).sum(),
    "count of each class": lambda y: torch.bincount(y.argmax(1), minlength=6),
    "histogram": lambda y: torch.histc(y.detach(), bins=4, min=-2, max=2),
    "accuracy": lambda y: (y.argmax(1) == 1).float().mean(),
    "mean squared error": lambda y: F.mse_loss(y, y.detach() * 2),
    "cross entropy": lambda y: F.cross_entropy(y, y.argmax(1)),
    "cross entropy without ignored": lambda y: F.cross_entropy(y, y.argmax(1).masked_fill(y[:, 0] > 0, -100)),
    "cross entropy with class weights": lambda y: F.cross_entropy(y, y.argmax(1), weight=torch.arange(1.0, 7.0)),
    "weighted mean": lambda y: (y[:, 0] * y[:, 1].sigmoid()).sum() / y[:, 1].sigmoid().sum(),
    "ratio of two sums": ratio,
    "mean of a mask": lambda y: y[y > 0].mean(),
    "covariance": lambda y: y.T @ y / len(y),
    "covariance, centred": lambda y: torch.cov(y.T),
    "mean times sum": lambda y: y.mean() * y.sum(),
    "difference of max and min": lambda y: y.max() - y.min(),
    "einsum over the batch": lambda y: torch.einsum("bi,bj->ij", y, y),
    # scans and pairs
    "cumulative sum": lambda y: y.cumsum(0),
    "cumulative max": lambda y: y.cummax(0).values,
    "running mean of two rows": running,
    "softmax over the batch": lambda y: y.softmax(0),
    "centred": lambda y: y - y.mean(0),
    "standardised": standardised,
    "divided by the norm": normalised_by_norm,
    "batch statistics": lambda y: F.batch_norm(y, None, None, training=True),
    "divided by the batch size": lambda y: y / len(y),
    "ranks": lambda y: y.argsort(0).argsort(0),
    "top rows": lambda y: y.topk(2, 0).values,
    "pairs": lambda y: y @ y.T,
    "distances": lambda y: torch.cdist(y, y),
    "diagonal of the pairs": lambda y: (y @ y.T).diagonal(),
    "contrastive loss": contrastive,
    "number of the row": lambda y: torch.arange(len(y)),
    "rows plus their number": lambda y: y + torch.arange(len(y))[:, None],
    # beside the batch
    "batch size": lambda y: {"rows": y, "batch": len(y)},
    "half of the batch size": lambda y: (y, len(y) / 2, len(y) >= 1),
    "batch size as a tensor": lambda y: torch.tensor(len(y)),
    "constants": lambda y: (y, torch.arange(3), torch.ones(2), 3, "text", None),
    "zeros for each sample": lambda y: torch.zeros(len(y), 2),
    "auxiliary mean": lambda y: (y, y.square().mean()),
    "auxiliary sum": lambda y: {"out": y, "aux": y.abs().sum()},
    "auxiliary maximum": lambda y: {"out": [y, (y.T, None)], "aux": {"max": y.max(), "mean": y.mean() + 2}},
    "a dataclass": lambda y: Scores(y, y.square().mean(), y.max(0).values),
    "rows, flipped rows and a ratio": lambda y: (y, y.flip(0), ratio(y)),
    "list of rows": lambda y: list(y.unbind(0)),
    "sum by a loop": lambda y: sum(row.sum() for row in y),
    "maximum by a loop": lambda y: torch.stack([row.max() for row in y]).max(),
    "flipped by a loop": lambda y: torch.stack([*y][::-1]),
    "sum by addition of slices": lambda y: y[0] + y[-1],
    "first token of the first sample": lambda y: y.view(-1, 2, 3)[0, 0],
    "written in place": lambda y: torch.zeros(6).add_(y.amax(0)),
    "linear layer behind a flip": lambda y: F.linear(y.flip(0), torch.ones(2, 6)),
}


class Model(nn.Module):
    """Two layers, and one of the FORMS behind them."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.a, self.b, self.ends = nn.Linear(3, 4), nn.Linear(4, 6), ends

    def forward(self, x: torch.Tensor) -> Any:
        return self.ends(self.b(self.a(x).tanh()))


def alike(mine: Any, theirs: Any) -> bool:
    """Return whether two outputs have the same structure, types and values (relative and absolute tolerance 1e-10)."""
    if pytree.tree_structure(mine) != pytree.tree_structure(theirs):
        return False
    pairs = zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True)
    return all(_alike(a, b) for a, b in pairs)


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return bool(type(a) is type(b) and a == b)
    if not isinstance(a, torch.Tensor) or (a.shape, a.dtype, a.requires_grad) != (b.shape, b.dtype, b.requires_grad):
        return False
    return torch.allclose(a.detach(), b.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)


def gradients(model: nn.Module, output: Any) -> list[torch.Tensor | None]:
    """Return the gradients of a scalar made of all differentiable outputs."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    model.zero_grad()
    if tensors:
        sum((leaf * torch.arange(1.0, leaf.numel() + 1).view(leaf.shape).sin()).sum() for leaf in tensors).backward()
    return [parameter.grad for parameter in model.parameters()]


def verdict(ends: Ends, count: int, samples: int) -> str:
    """Return "right", "refused: why", "warned" or "DIFFERENT" for one form, number of micro-batches and batch size."""
    torch.manual_seed(samples)
    model = Model(ends)
    eager, x = copy.deepcopy(model), torch.randn(samples, 3)
    expected = eager(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=count)
            with torch.no_grad():
                first = pipe(x)
            output = pipe(x)
        except pc.PipecompileError as error:
            return f"refused: {error.what}"
        is_right = alike(output, expected) and alike(
            first, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, expected)
        )
        if is_right:
            pairs = zip(gradients(model, output), gradients(eager, expected), strict=True)
            is_right = all(
                (b is None or not b.any())
                if a is None
                else b is not None and torch.allclose(a, b, rtol=1e-9, atol=1e-10)
                for a, b in pairs
            )
    told = [one for one in caught if issubclass(one.category, pc.RecordingWarning)]
    return "right" if is_right else "warned" if told else "DIFFERENT"


def row(ends: Ends) -> list[str]:
    """Return the verdicts of a form: even and uneven batches for each of the COUNTS."""
    return [verdict(ends, count, samples) for count in COUNTS for samples in (3 * count, 3 * count + 1 + count // 3)]


def page(rows: dict[str, list[str]]) -> str:
    """Return the table as markdown."""
    cells = [cell for row in rows.values() for cell in row]
    kinds = {name: sum(cell.startswith(name) for cell in cells) for name in ("right", "refused", "warned", "DIFFERENT")}
    lines = [
        "# Outputs of many forms, from micro-batches",
        "",
        f"Written by `benchmarks/output_forms.py`: {len(rows)} forms, each in {', '.join(map(str, COUNTS))} micro-batches, even and uneven.",
        f"{len(cells)} calls with and without gradients, values and gradients compared with eager's on the mini-batch (in double precision, tolerance 1e-10):",
        f"{kinds['right']} right, {kinds['refused']} refused, {kinds['warned']} different with a warning, {kinds['DIFFERENT']} silently different.",
        "",
        "| output | right | refused | warned | silently different |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        counts = [sum(cell.startswith(kind) for cell in row) for kind in ("right", "refused", "warned", "DIFFERENT")]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="forms with this in their name")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    rows = {}
    for name, ends in FORMS.items():
        if arguments.only is None or arguments.only in name:
            rows[name] = row(ends)
            print(f"{name:45} {sorted(set(rows[name]))}", flush=True)
    text = page(rows)
    print("\n".join(text.splitlines()[2:5]))
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
