"""Lists that hooks of several stages append to: a warning where their items do not come in the order of the plain loop."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

M = 4


class Watched(nn.Sequential):
    """A hook on each layer appends to one list: of the model, or one that the hook closes over."""

    def __init__(self, is_closed_over: bool) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(4)))
        self.seen: list[torch.Tensor] = []
        seen = self.seen
        for layer in self:
            if is_closed_over:
                layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output.detach()))
            else:
                layer.register_forward_hook(lambda _layer, _inputs, output: self.seen.append(output.detach()))


def _run(is_closed_over: bool, **options: Any) -> tuple[bool, list[str]]:
    """Return whether the list is that of the plain loop, and the warnings."""
    torch.manual_seed(0)
    model, x, target = Watched(is_closed_over), torch.randn(2 * M, 6), torch.randint(6, (2 * M,))
    other = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(
            model, 4, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, cost="analytic", **options
        )
        pipe.step(x, target=target)
        pipe.step(x, target=target)
    wanted = [h for _ in range(2) for part in x.chunk(M) for h in _activations(other, part)]
    texts = [str(one.message) for one in caught if "order of the plain loop" in str(one.message)]
    return all(map(torch.equal, model.seen, wanted)) and len(model.seen) == len(wanted), texts


def _activations(model: nn.Sequential, h: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layer in model:
        h = nn.functional.linear(h, layer.weight, layer.bias)
        found.append(h.detach())
    return found


@pytest.mark.parametrize("is_closed_over", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "devices": ["cpu"] * 2},
        {"schedule": "gpipe", "dispatch": "threads"},
    ],
    ids=str,
)
def test_a_list_in_another_order_is_warned_of_once(options: dict[str, Any], is_closed_over: bool) -> None:
    is_equal, texts = _run(is_closed_over, **options)
    assert is_equal or texts
    if "devices" not in options and "dispatch" not in options:
        assert is_equal
        assert not texts
    else:
        assert len(texts) == 1
        assert "stages 0, 1, 2, 3 changes 'seen'" in texts[0]


def test_threads_that_one_stage_appends_in_keep_the_order() -> None:
    torch.manual_seed(0)
    model, seen = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), []  # type: ignore[var-annotated]
    model[1].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.detach()))
    x, target = torch.randn(2 * M, 6), torch.randint(6, (2 * M,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        pipe = pc.compile(
            model, 4, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, cost="analytic", dispatch="threads"
        )
        pipe.step(x, target=target)
    assert torch.allclose(torch.cat(seen), model[:2](x))
