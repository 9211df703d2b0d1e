from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.device_placement import follow_device
from pipecompile.graph.stages import routes, split
from pipecompile.tracing import trace


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.a(x), x.shape[0])


def as_stage(body, target: torch.device) -> nn.Module:
    """The model as one stage, moved to `target`."""
    model = Body(body)
    graph = trace(model, torch.randn(3, 4))
    stage_of = {node.name: 0 for node in compute_nodes(graph)}
    (stage,) = split(graph, routes(graph, stage_of), stage_of, [target])
    model.to(target)
    return stage.module


@pytest.mark.parametrize(
    "body",
    [
        lambda h, n: h + torch.zeros(n, 4),
        lambda h, n: h + torch.zeros(n, 4, device=h.device),
        lambda h, n: h + torch.zeros(n, 4, device="cpu"),
        lambda h, n: h + torch.arange(4) + torch.eye(4).sum(0) + torch.tensor([1, 2, 3, 4]) + torch.rand(4),
        lambda h, n: h.to("cpu") + h.cpu() + h.to(torch.device("cpu")),
        lambda h, n: h + torch.zeros(4).to(h.device).type_as(h),
        lambda h, n: h + h.new_zeros(4) + torch.ones_like(h),
        lambda h, n: h + torch.hann_window(4) + torch.full((n, 1), 2.0) + torch.linspace(0, 1, 4),
        lambda h, n: h[torch.triu_indices(2, 2)[0]].sum(0) + h,
    ],
)
def test_what_forward_creates_follows_the_stage(body):
    meta = torch.device("meta")
    module = as_stage(body, meta)
    sized = "batch_size" in [node.name for node in module.graph.nodes]
    made = module(torch.randn(5, 4, device=meta), *[5] * sized)
    assert [value.device for value in made] == [meta]


def test_nothing_changes_where_the_model_was_recorded():
    graph = trace(Body(lambda h, n: h.cpu() + torch.zeros(4)), torch.randn(3, 4))
    before = str(graph.graph)
    assert str(follow_device(graph.graph, torch.device("cpu"), torch.device("cpu", 0))) == before


def test_what_is_elsewhere_on_purpose_stays_there():
    graph = trace(Body(lambda h, n: (h, torch.zeros(4, device="meta"), h.to("meta"))), torch.randn(3, 4))
    follow_device(graph.graph, torch.device("cpu"), torch.device("cuda:1"))
    assert graph.graph.find_nodes(op="call_function", target=torch.zeros)[0].kwargs == {"device": "meta"}
    assert graph.graph.find_nodes(op="call_method", target="to")[0].args[1] == "meta"


def test_autocast_follows():
    def body(h, n):
        with torch.autocast(h.device.type, torch.bfloat16):
            return h @ h.T

    graph = trace(Body(body), torch.randn(3, 4))
    follow_device(graph.graph, torch.device("cpu"), torch.device("cuda:1"))
    entered = next(node for node in graph.graph.nodes if "enter_autocast" in node.name)
    assert entered.args[:2] == ("cuda", torch.bfloat16)
