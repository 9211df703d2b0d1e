"""Losses in micro-batches against eager's on the mini-batch: many kinds for one step, and five training scripts for 20 steps.

    python benchmarks/losses.py [--only masked] [--markdown benchmarks/results/losses.md]

A step counts as right if loss and gradients are eager's, as refused if it raises, as warned if it differs and a RecordingWarning was
given; else it is silently different. Labels are ignored at random, and one micro-batch has none that count.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

COUNTS, BATCHES = (2, 3, 4), (8, 7)
"""Numbers of micro-batches, and of samples: even and uneven."""

FEATURES, CLASSES = 6, 5
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
Loss = Callable[..., Any]


def each(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, t.clamp(min=0), reduction="none")


def dice(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p, is_first = y.softmax(-1)[:, 0], (t == 0).float()
    return 1 - (2 * (p * is_first).sum() + 1) / (p.sum() + is_first.sum() + 1)


def masked(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = (t != -100).float()
    return (each(y, t) * mask).sum() / mask.sum()


def contrastive(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    z = F.normalize(y, dim=-1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))


def supervised_pairs(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(y @ y.T, (t[:, None] == t).float())


def by_python(y: torch.Tensor, t: torch.Tensor) -> Any:
    kept = [i for i in range(len(y)) if int(t[i]) >= 0]
    return sum((y[i, int(t[i])] - 1) ** 2 for i in kept) / max(len(kept), 1)


def by_numpy(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    rows = torch.from_numpy((t.numpy() >= 0).nonzero()[0])
    return F.cross_entropy(y[rows], t[rows])


LOSSES: dict[str, Loss] = {
    # plain means
    "cross entropy": lambda y, t: F.cross_entropy(y, t.clamp(min=0)),
    "mean squared error": lambda y, t: F.mse_loss(y[:, 0], t.float()),
    "smooth L1": lambda y, t: F.smooth_l1_loss(y[:, 0], t.float()),
    "hinge": lambda y, t: F.multi_margin_loss(y, t.clamp(min=0)),
    "divergence, batchmean": lambda y, _: F.kl_div(y.log_softmax(-1), torch.full_like(y, 0.2), reduction="batchmean"),
    "class probabilities": lambda y, t: F.cross_entropy(y, F.one_hot(t.clamp(min=0), CLASSES).float()),
    "binary, positive weights": lambda y, t: F.binary_cross_entropy_with_logits(
        y, F.one_hot(t.clamp(min=0), CLASSES).float(), pos_weight=WEIGHTS
    ),
    "probabilities": lambda y, t: F.binary_cross_entropy(y.sigmoid(), F.one_hot(t.clamp(min=0), CLASSES).float()),
    "sum over the batch size": lambda y, t: each(y, t).sum() / len(y),
    "label smoothing": lambda y, t: F.cross_entropy(y, t.clamp(min=0), label_smoothing=0.1),
    # means over what counts
    "ignore_index": F.cross_entropy,
    "ignore_index=0": lambda y, t: F.cross_entropy(y, t.clamp(min=0), ignore_index=0),
    "module, ignore_index": nn.CrossEntropyLoss(ignore_index=-100),
    "module, class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "class weights": lambda y, t: F.cross_entropy(y, t.clamp(min=0), weight=WEIGHTS),
    "class weights, ignored": lambda y, t: F.cross_entropy(y, t, weight=WEIGHTS),
    "class weights, smoothing": lambda y, t: F.cross_entropy(y, t, weight=WEIGHTS, label_smoothing=0.1),
    "nll": lambda y, t: F.nll_loss(y.log_softmax(-1), t),
    "half of it": lambda y, t: 0.5 * F.cross_entropy(y, t),
    "plus a constant": lambda y, t: F.cross_entropy(y, t) + 1.0,
    "two terms, one count": lambda y, t: F.cross_entropy(y, t) + 0.4 * F.nll_loss((-y).log_softmax(-1), t),
    "mask": masked,
    "mask, least count 1": lambda y, t: (each(y, t) * (t >= 0)).sum() / (t >= 0).sum().clamp(min=1),
    "mask, ratio of means": lambda y, t: (each(y, t) * (t >= 0)).mean() / (t >= 0).float().mean(),
    "mask by where": lambda y, t: torch.where(t >= 0, each(y, t), 0.0).sum() / (t >= 0).sum().clamp(min=1),
    "sum over counted labels": lambda y, t: F.cross_entropy(y, t, reduction="sum") / (t != -100).sum(),
    "focal over counted": lambda y, t: ((1 - (-each(y, t)).exp()) ** 2 * each(y, t) * (t >= 0)).sum() / (t >= 0).sum(),
    "weights by target": lambda y, t: (each(y, t) * (t.clamp(min=0) + 1)).sum() / (t.clamp(min=0) + 1).sum(),
    "selected rows": lambda y, t: F.cross_entropy(y[t >= 0], t[t >= 0]),
    "mean of selected": lambda y, t: each(y, t)[t >= 0].mean(),
    "masked_select": lambda y, t: each(y, t).masked_select(t >= 0).mean(),
    "selected by NumPy": by_numpy,
    "Python loop": by_python,
    "item() in the divisor": lambda y, t: F.cross_entropy(y, t, reduction="sum") / max((t >= 0).sum().item(), 1),
    # sums
    "sum": lambda y, t: each(y, t).sum(),
    "sum over a fixed number": lambda y, t: each(y, t).sum() / 7.0,
    # micro-batches change it
    "dice": dice,
    "cross entropy and dice": lambda y, t: F.cross_entropy(y, t) + dice(y, t),
    "two counts": lambda y, t: F.cross_entropy(y, t) + 0.1 * y.square().mean(),
    "contrastive": contrastive,
    "pairs of labels": supervised_pairs,
    "standard deviation": lambda y, t: F.cross_entropy(y, t.clamp(min=0)) + y.std(),
    "normalised by the batch": lambda y, t: F.cross_entropy(y / y.std(), t),
    "softmax over the batch": lambda y, t: -(y.log_softmax(0)[:, 0] * (t >= 0)).mean(),
    "hardest sample": lambda y, t: each(y, t).max(),
    "hardest two": lambda y, t: each(y, t).topk(2).values.mean() if len(y) > 1 else each(y, t).mean(),
    "root of the mean": lambda y, t: F.mse_loss(y[:, 0], t.float()).sqrt(),
    "median": lambda y, t: each(y, t).median(),
    "covariance": lambda y, _: torch.cov(y.T).square().sum() if len(y) > 1 else y.square().sum(),
    # no gradient
    "detached": lambda y, t: F.cross_entropy(y, t.clamp(min=0)).detach(),
}


class Net(nn.Module):
    """Two layers; with `loss`, the model computes its loss."""

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.b(self.a(x).tanh())
        return y if self.loss is None else {"loss": self.loss(y, labels), "logits": y}


def labels_of(samples: int) -> torch.Tensor:
    """Return class indices of which the first three are ignored."""
    labels = torch.randint(CLASSES, (samples,))
    labels[:3] = -100
    return labels


def close(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Return whether two gradients or losses agree (relative tolerance 1e-3, absolute 1e-6)."""
    if mine is None or theirs is None:
        return mine is theirs
    return torch.allclose(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-6)


def verdict(loss_fn: Loss, count: int, samples: int) -> str:
    """Return "right", "refused", "warned" or "DIFFERENT" for one step. An error that eager raises, too, is right."""
    torch.manual_seed(samples)
    model = Net()
    eager, x, labels = copy.deepcopy(model), torch.randn(samples, FEATURES), labels_of(samples)
    expected, is_trained = loss_fn(eager(x), labels), True
    try:
        expected.backward()
    except RuntimeError:
        is_trained = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pipe = pc.compile(
                model, 2, devices=["cpu"] * 2, n_microbatches=count, cost="analytic", dispatch="inline", loss_fn=loss_fn
            )
            loss = pipe.step(x, target=labels)
        except pc.PipecompileError as error:
            return "refused" if is_trained else "right" if isinstance(error, RuntimeError) else "DIFFERENT"
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    if is_trained and close(loss, expected) and all(close(mine.grad, theirs.grad) for mine, theirs in pairs):
        return "right"
    return "warned" if any(issubclass(one.category, pc.RecordingWarning) for one in caught) else "DIFFERENT"


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """A training script: a model, its batches, its loss if the model has none, and options of `compile`. A batch is (arguments, target
    or None).
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[dict[str, Any], Any]]
    loss_fn: Loss | None = None
    options: dict[str, Any] = field(default_factory=dict)


VOCABULARY, LENGTH = 29, 12


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config)


def padded_text() -> tuple[dict[str, Any], Any]:
    """Return sequences whose prompts and paddings have the label -100."""
    ids = torch.randint(VOCABULARY, (8, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (8, 1))
    place = torch.arange(LENGTH)
    labels = ids.masked_fill((place >= lengths) | (place < lengths // 3), -100)
    return {"input_ids": ids, "attention_mask": (place < lengths).long(), "labels": labels}, None


def packed_text() -> tuple[dict[str, Any], Any]:
    """Return rows of two documents each: positions start again, and the mask is block-diagonal and causal."""
    ids = torch.randint(VOCABULARY, (8, LENGTH))
    place = torch.arange(LENGTH)
    starts = torch.randint(3, LENGTH - 3, (8, 1))
    document = (place >= starts).long()
    allowed = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
    mask = torch.zeros(8, 1, LENGTH, LENGTH).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    labels = ids.masked_fill((place == starts) | (torch.rand(8, LENGTH) < 0.3), -100)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": place - starts * document, "labels": labels}, None


class Segmenter(nn.Module):
    """A small network with a class per pixel, and an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.out, self.aux = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.a(x).relu()
        return {"out": self.out(self.b(low).relu()), "aux": self.aux(low)}


def segmentation_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(output["out"], target, ignore_index=255)
    return loss + 0.5 * F.cross_entropy(output["aux"], target, ignore_index=255)


def pixels() -> tuple[dict[str, Any], Any]:
    target = torch.randint(CLASSES, (8, 6, 6))
    share = torch.rand(8, 1, 1)
    return {"x": torch.randn(8, 3, 6, 6)}, target.masked_fill(torch.rand(8, 6, 6) < share, 255)


def rows() -> tuple[dict[str, Any], Any]:
    return {"x": torch.randn(8, FEATURES)}, torch.randint(CLASSES, (8,))


SCRIPTS: dict[str, Script] = {
    "Llama of transformers, labels of -100": Script(language_model, padded_text),
    "packed documents, block-diagonal mask": Script(language_model, packed_text),
    "segmentation, ignore_index and two heads": Script(Segmenter, pixels, segmentation_loss),
    "class weights": Script(Net, rows, nn.CrossEntropyLoss(weight=WEIGHTS)),
    "contrastive in the batch": Script(Net, rows, contrastive),
    "contrastive, across_batch='exact'": Script(Net, rows, contrastive, {"schedule": "gpipe", "across_batch": "exact"}),
}


def train(script: Script, steps: int, count: int, schedule: str = "1f1b") -> tuple[float, str]:
    """Return the largest difference of the two loss curves, pipeline and eager on the mini-batch, and the first warning."""
    torch.manual_seed(1)
    model = script.model()
    eager = copy.deepcopy(model)
    options = {"schedule": schedule} | script.options
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=count, cost="analytic", dispatch="inline",
                      loss_fn=script.loss_fn, **options)  # fmt: skip
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, eager))
    largest = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            arguments, target = script.batch()
            mine.zero_grad()
            theirs.zero_grad()
            loss = pipe.step(**arguments) if target is None else pipe.step(**arguments, target=target)
            output = eager(**arguments)
            expected = output["loss"] if script.loss_fn is None else script.loss_fn(output, target)
            expected.backward()
            mine.step()
            theirs.step()
            largest = max(largest, abs(float(loss) - float(expected)))
    told = [str(one.message) for one in caught if issubclass(one.category, pc.RecordingWarning)]
    return largest, told[0].splitlines()[0] if told else ""


# -- the report -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Print both tables, and write them with --markdown. Exit with 1 if anything is silently different."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    columns = [(count, samples) for samples in BATCHES for count in COUNTS]
    lines = ["# Losses in micro-batches", "", f"`python benchmarks/losses.py --markdown {options.markdown}`, torch {torch.__version__}", "",
             "One step, loss and gradients against eager's on the mini-batch; columns are micro-batches of a batch.", "",
             "| loss | " + " | ".join(f"{count} of {samples}" for count, samples in columns) + " |",
             "|---|" + "---|" * len(columns)]  # fmt: skip
    tally: Counter[str] = Counter()
    for name, loss_fn in LOSSES.items():
        if options.only in name:
            found = [verdict(loss_fn, count, samples) for count, samples in columns]
            tally.update(found)
            lines.append(f"| {name} | " + " | ".join(found) + " |")
            print(lines[-1], flush=True)
    lines += ["", ", ".join(f"{kind}: {number}" for kind, number in tally.most_common()) + f"; DIFFERENT: {tally['DIFFERENT']}", "",
              "20 steps of AdamW in 3 micro-batches of 8 samples; tolerance 1e-4 in the loss.", "",
              "| script | largest difference | verdict |", "|---|---|---|"]  # fmt: skip
    is_silent = tally["DIFFERENT"] > 0
    for name, script in SCRIPTS.items():
        if options.only in name:
            largest, told = train(script, 20, 3)
            kind = "right" if largest <= 1e-4 else f"warned: {told}" if told else "DIFFERENT"
            is_silent |= kind == "DIFFERENT"
            lines.append(f"| {name} | {largest:.1e} | {kind} |")
            print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    raise SystemExit(is_silent)


if __name__ == "__main__":
    main()
