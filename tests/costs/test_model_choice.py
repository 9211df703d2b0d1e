from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from pipecompile.costs import NodeCost, node_costs
from pipecompile.costs import model_choice as choice
from pipecompile.errors import InputError


def model(device: str = "cpu") -> GraphModule:
    with torch.device(device):
        return symbolic_trace(nn.Sequential(nn.Linear(4, 4)))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was called: "profile", or the device that was computed for."""
    calls: list[object] = []

    def note(_graph: object, _inputs: object, device: object = "profile", **_options: object) -> dict[str, NodeCost]:
        calls.append(device)
        return {}

    monkeypatch.setattr(choice, "profiled_costs", note)
    monkeypatch.setattr(choice, "analytic_costs", note)
    return calls


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("home", "cost", "device", "expected"),
    [
        ("cpu", "auto", None, "profile"),
        ("cpu", "auto", "cpu", "profile"),
        ("cpu", "auto", "h100", "h100"),
        ("cpu", "auto", torch.device("cuda:0"), torch.device("cuda:0")),
        ("cpu", "analytic", None, CPU),
        ("cpu", "analytic", "h100", "h100"),
        ("cpu", "profile", "h100", "profile"),
        ("meta", "auto", None, "a100"),
        ("meta", "auto", "h100", "h100"),
        ("meta", "analytic", None, "a100"),
    ],
)
def test_which_model_is_used(
    chosen: list[object], home: str, cost: str, device: torch.device | str | None, expected: object
) -> None:
    node_costs(model(home), [torch.zeros(2, 4, device=home)], cost=cost, device=device)
    assert chosen == [expected]


def test_meta_inputs_of_a_real_model_are_computed() -> None:
    assert node_costs(model(), [torch.zeros(2, 4, device="meta")])["_0"].saved_bytes == 2 * 4 * 4


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'guess'(.|\n)*auto, analytic, profile"):
        node_costs(model(), [torch.zeros(2, 4)], cost="guess")


def test_what_has_no_memory_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="only real tensors"):
        node_costs(model("meta"), [torch.zeros(2, 4)], cost="profile")


def test_a_provider_of_ones_own_is_called() -> None:
    own = {"_0": NodeCost(1.0, 2.0, 3, 4)}
    assert node_costs(model(), [], cost=lambda *_: own) is own
