"""State that a piece kept whole changes in some micro-batches, and that the rest of the model reads: a warning names it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc

pytestmark = pytest.mark.smoke


class Counts(nn.Module):
    """A method that is kept whole counts the micro-batches with a large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.hits, self.own = 0, 0

    def middle(self, x):
        if x.mean() > 0.9:
            self.hits += 1
            self.own += 1
            return self.b(x) * self.own
        return x

    def forward(self, x):
        return self.o(self.a(self.middle(x))) * (1 + self.hits)


class Lists(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def middle(self, x):
        if x.mean() > 0.9:
            self.seen.append(1)
        return self.b(x)

    def forward(self, x):
        return self.o(self.a(self.middle(x))) * (1 + len(self.seen))


class Reads(Counts):
    """Only the piece reads what it changes."""

    def forward(self, x):
        return self.o(self.a(self.middle(x)))


def warned(pipe: Any, x: torch.Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, target=torch.zeros(8, 8))
    return [str(one.message) for one in caught if "was changed in a step" in str(one.message)]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("kind", "name"), [(Counts, "model.hits"), (Lists, "model.seen"), (Reads, "")])
def test_a_value_from_before_the_step_is_a_warning(kind: Any, name: str, checkpoint: Any) -> None:
    """The first micro-batch did not change it, so the check of the recording could not see it."""
    pipe = pc.compile(
        kind(), 2, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean(), cost="analytic", checkpoint=checkpoint
    )  # fmt: skip
    x = torch.zeros(8, 8)
    assert warned(pipe, x) == []
    x[4:] = 1
    texts = warned(pipe, x)
    assert len(texts) == bool(name)
    assert all(f"{name} was changed in a step, by a piece" in text and "kind" not in text for text in texts)
    assert all("test_state_read_behind_pieces.py" in text and f"in {kind.__name__}.forward" in text for text in texts)
    x[2:] = 2
    assert warned(pipe, x) == []  # once per value
