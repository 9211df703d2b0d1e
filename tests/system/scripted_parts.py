"""Layers, models and losses of which random scripts train one: ways to write a layer, skips, layers used twice, inputs and outputs of
several kinds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.system.stateful_parts import CLASSES, WIDTH, Part

__all__ = ["LAYERS", "LOSSES", "Averaged", "Flagged", "RandomNet", "WholeBatch", "leaves", "logits_of"]

LENGTH = 4


class Normed(Part):
    def set_up(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)


class Attentive(Part):
    def set_up(self) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(Part):
    def set_up(self) -> None:
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.size(0), WIDTH)
        outputs = []
        for place in range(x.size(1)):
            hidden, state = self.cell(x[:, place], (hidden, state))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class InPlace(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layer(x), inplace=True) * 2
        y[:, 0].mul_(0.5)
        y[..., :2].add_(1.0)
        return y * x


class Routed(Part):
    """Sends each row to one of two layers."""

    def set_up(self) -> None:
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best, y = weights.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero(as_tuple=True)
            y[rows] = expert(x[rows]) * weights[rows][:, index : index + 1]
        return x + y


class WithoutGradients(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).sigmoid()
        return x * scale + self.layer(x) + (x.tanh() - x).detach()


class Averaged(Part):
    """Is subtracted a running mean, as training has it."""

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.layer(x) - self.mean


class Flagged(Part):
    """Reads what a script changes."""

    def set_up(self) -> None:
        self.scale, self.is_flipped = 0.5, False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flip(1)) + self.scale if self.is_flipped else self.layer(x) * self.scale


class WeightNormed(Part):
    def set_up(self) -> None:
        self.layer = nn.utils.parametrizations.weight_norm(self.layer)


class Recomputed(Part):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=False)


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > -1) * 1.5


class OwnFunction(Part):
    def forward(self, x: Tensor) -> Tensor:
        return _Clamped.apply(self.layer(x))


class Sorted(Part):
    def forward(self, x: Tensor) -> Tensor:
        values, places = self.layer(x).sort(-1)
        return values.gather(-1, places.flip(-1)) + x


class Looked(Part):
    def set_up(self) -> None:
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.sum(-1).detach().abs() * 10).long() % 11)


class WholeBatch(Part):
    """Branches on all samples: of a call with gradients, on those of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / 2 if x.abs().max() > 1.5 else self.layer(x)


LAYERS = (
    Part, Normed, Attentive, Recurrent, InPlace, Routed, WithoutGradients, Averaged, Flagged, WeightNormed, Recomputed, OwnFunction,
    Sorted, Looked, WholeBatch,
)  # fmt: skip


@dataclass
class Scored:
    """An output of named parts."""

    logits: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    """An output of two parts, one of them nested."""

    logits: Tensor
    rest: tuple[Tensor, Tensor]


class RandomNet(nn.Module):
    """Layers with skips, of which one may be used twice, a head, and perhaps a table tied to it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(draw.choice(LAYERS)() for _ in range(draw.randint(3, 6)))
        self.order = [*range(len(self.layers))]
        if draw.random() < 0.3:
            self.order.insert(draw.randrange(1, len(self.order)), draw.randrange(len(self.layers)))
        self.skips = {place: draw.randrange(place + 1) for place in range(1, len(self.order)) if draw.random() < 0.35}
        self.head, self.form = (
            nn.Linear(WIDTH, CLASSES),
            draw.choice(["tensor", "tensor", "tuple", "dict", "data", "pair"]),
        )
        self.table = nn.Embedding(CLASSES, WIDTH) if draw.random() < 0.3 else None
        if self.table is not None:
            self.head.weight = self.table.weight
        self.extras = {name for name in ("scale", "mask", "flag", "further") if draw.random() < 0.25}

    def forward(
        self, x: Tensor, scale: Any = None, mask: Any = None, *, is_negative: bool = False, further: Any = None
    ) -> Any:
        if self.table is not None:
            x = x + self.table(torch.zeros(x.shape[:2], dtype=torch.long))
        seen = [x]
        for place, index in enumerate(self.order):
            y = self.layers[index](seen[-1])
            y = y + seen[self.skips[place]] if place in self.skips else y
            y = y * mask.unsqueeze(-1) if mask is not None and place == 1 else y
            y = y * scale if scale is not None and place == 2 else y
            y = y + further["inputs"][0] if further is not None and place == 0 else y
            seen.append(y)
        return self.output(-seen[-1] if is_negative else seen[-1], seen)

    def output(self, hidden: Tensor, seen: list[Tensor]) -> Any:
        logits = self.head(hidden.mean(1))
        forms = {
            "tensor": logits,
            "tuple": (logits, hidden.detach(), None),
            "dict": {"logits": logits, "hidden": [hidden, seen[1]], "count": 3},
            "data": Scored(logits, hidden),
            "pair": Pair(logits, (seen[0], hidden)),
        }
        return forms[self.form]

    def batch(self, draw: random.Random, samples: int) -> tuple[dict[str, Any], Tensor]:
        """Return arguments of the model, and a target."""
        inputs: dict[str, Any] = {"x": torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64)}
        if "scale" in self.extras:
            inputs["scale"] = draw.choice([0.5, 2.0, torch.tensor(0.7, dtype=torch.float64)])
        if "mask" in self.extras:
            inputs["mask"] = (torch.rand(samples, LENGTH) > 0.2).double()
        if "flag" in self.extras:
            inputs["is_negative"] = draw.random() < 0.3
        if "further" in self.extras:
            inputs["further"] = {"inputs": [torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64)]}
        return inputs, torch.randint(CLASSES, (samples,))


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["logits"]
    return output.logits if isinstance(output, (Scored, Pair)) else output[0]


def leaves(output: Any) -> list[Tensor]:
    """Return the tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Scored):
        return leaves([output.logits, output.hidden])
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def _of_all_outputs(output: Any, target: Tensor) -> Tensor:
    squares = [leaf.square().mean() for leaf in leaves(output)]
    return F.cross_entropy(logits_of(output), target) + 0.1 * torch.stack(squares).sum()


LOSSES = (
    lambda output, target: F.cross_entropy(logits_of(output), target),
    lambda output, target: F.cross_entropy(logits_of(output), target, label_smoothing=0.1),
    lambda output, target: F.mse_loss(logits_of(output), F.one_hot(target, CLASSES).double()),
    _of_all_outputs,
)
