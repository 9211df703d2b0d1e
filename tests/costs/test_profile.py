from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, symbolic_trace
from torchvision.models import VisionTransformer, densenet121, resnet18, swin_t

from pipecompile.costs import profile
from pipecompile.costs.analytic import analytic_costs
from pipecompile.costs.node_cost import CostError, NodeCost
from pipecompile.costs.profile import Repeats, StreamClock, measure_until_stable, overall_spread, profiled_costs
from pipecompile.text.progress import Task
from pipecompile.tracing.node_facts import note
from pipecompile.tracing.recording import trace

QUICK = Repeats(least=2, most=3, budget=1.0)


def compute_names(graph: GraphModule) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op.startswith("call_")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("build", "size"),
    [(resnet18, 64), (densenet121, 64), (lambda: VisionTransformer(32, 16, 4, 4, 64, 128), 32), (swin_t, 32)],
)
def test_models_are_measured_whole(build: Callable[[], nn.Module], size: int, found: type) -> None:
    graph, x = symbolic_trace(build()), torch.randn(2, 3, size, size)
    before = found(graph)
    costs = profiled_costs(graph, [x], repeats=QUICK)
    before.check()
    assert list(costs) == compute_names(graph)
    assert sum(cost.backward for cost in costs.values()) > 0.2 * sum(cost.forward for cost in costs.values())


def test_profile_and_analytic_agree_on_bytes_and_flops(unet: nn.Module) -> None:
    graph, x = symbolic_trace(unet), torch.randn(2, 3, 16, 16)
    measured, computed = profiled_costs(graph, [x], repeats=QUICK), analytic_costs(graph, [x], device="cpu")
    assert measured.keys() == computed.keys()
    for name, cost in measured.items():
        other = computed[name]
        found, expected = ((one.saved_bytes, one.output_bytes, one.flops) for one in (cost, other))
        assert (name, *found) == (name, *expected)
    assert any(cost.flops for cost in measured.values())


def test_the_nodes_add_up_to_the_forward() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))), torch.randn(256, 512)
    graph, times = symbolic_trace(model), []
    for _ in range(7):
        start = perf_counter()
        model(x)
        times.append(perf_counter() - start)
    total = sum(cost.forward for cost in profiled_costs(graph, [x]).values())
    assert min(times) / 3 < total < max(times) * 3


def test_a_layer_eight_times_as_heavy_takes_longer_both_ways() -> None:
    costs = profiled_costs(
        symbolic_trace(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2048))), [torch.randn(256, 256)]
    )
    assert costs["_1"].forward > 2 * costs["_0"].forward
    assert costs["_1"].backward > 2 * costs["_0"].backward


def test_the_zoo_is_measured_and_left_as_it_was(zoo: nn.Module, tokens: Tensor, found: type) -> None:
    zoo.get_submodule("norm").eval()
    zoo.get_parameter("linear.weight").grad = torch.ones(16, 16)
    graph = symbolic_trace(zoo)
    before = found(zoo)
    costs = profiled_costs(graph, [tokens.repeat(64, 1)], repeats=QUICK)  # so much that it does not drown in noise
    before.check()
    assert all(costs[name].backward > 0 for name in ("embed", "lstm", "attention", "norm", "linear", "frozen"))
    assert costs["size"] == NodeCost(0.0, 0.0, 0, 0, weight=0.0)
    assert costs["arange"].backward == 0.0


def test_running_statistics_of_a_training_batch_norm_are_put_back(found: type) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(8, 4) + 5
    model(x)
    before = found(model)
    profiled_costs(symbolic_trace(model), [x], repeats=QUICK)
    before.check()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


def test_an_error_names_the_node_and_leaves_the_model_as_it_was(found: type) -> None:
    class Leafy(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Failing) or super().is_leaf_module(m, module_qualified_name)

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Failing())
    graph = Leafy().trace(model)
    note(graph.find_nodes(op="call_module", target="2")[0], source="net.py:7 in forward")
    x = torch.randn(8, 4)
    before = found(model)
    with pytest.raises(CostError, match=r"node _2 .*out of luck(.|\n)*net.py:7 in forward"):
        profiled_costs(GraphModule(model, graph), [x])
    before.check()


def regions(exit_them: bool) -> GraphModule:
    """linear under no_grad, linear under autocast; the last thing either exits the region or fails inside it."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    silent = graph.call_module("0", (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    region = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, True))
    low = graph.call_module("0", (graph.call_module("0", (x,)),))
    if exit_them:
        graph.call_function(_exit_autocast, (region,))
    graph.output((silent, low if exit_them else graph.call_method("nonsense", (low,))))
    return GraphModule(nn.Sequential(nn.Linear(4, 4)), graph)


def test_grad_and_autocast_regions_are_respected(found: type) -> None:
    graph, x = regions(exit_them=True), torch.randn(3, 4)
    before = found(graph)
    costs = profiled_costs(graph, [x], repeats=QUICK)
    before.check()
    assert [cost.output_bytes for name, cost in costs.items() if name.startswith("_0")] == [48, 24, 24]
    assert costs["_0"].backward == costs["_0"].saved_bytes == 0
    assert costs["_0_1"].saved_bytes > 0
    assert all(
        costs[name] == NodeCost(0.0, 0.0, 0, 0, weight=0.0) for name in costs if "autocast" in name or "grad" in name
    )


def test_an_error_inside_a_region_leaves_it(found: type) -> None:
    graph, x = regions(exit_them=False), torch.randn(3, 4)
    before = found(graph)
    with pytest.raises(CostError, match="nonsense"):
        profiled_costs(graph, [x], repeats=QUICK)
    before.check()


def test_inference_mode_of_the_caller_does_not_matter() -> None:
    graph = symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with torch.inference_mode():
        costs = profiled_costs(graph, [torch.randn(2, 4)], repeats=QUICK)
        assert torch.is_inference_mode_enabled()
    assert costs["_0"].forward > 0
    assert costs["_0"].backward == 0.0


def looks(times: list[float], repeats: Repeats) -> tuple[float, int]:
    """The median of what sweeps of one node show, and how many sweeps were made."""
    runs = [{"node": (seconds, 0.0, 0.0)} for seconds in times]
    left = iter(runs)
    rows = measure_until_stable(lambda: next(left), repeats)["node"]
    return median(forward for forward, *_ in rows), len(rows)


@pytest.mark.parametrize(
    ("times", "sweeps", "middle"),
    [
        ([2.0, 2.0, 2.0, 9.0], 3, 2.0),  # stable at once
        ([1.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 9.0], 5, 2.0),  # one outlier on each side is outvoted
        ([1.0, 2.0] * 10, 8, 1.5),  # never stable: `most`
    ],
)
def test_sweeps_are_made_until_the_times_are_stable(times: list[float], sweeps: int, middle: float) -> None:
    assert looks(times, Repeats(least=3, most=8, spread=0.1)) == (middle, sweeps)


def test_the_budget_ends_the_sweeps_but_not_before_the_least() -> None:
    assert looks([1.0] * 9, Repeats(least=2, most=10**9, spread=-1.0, budget=0.0)) == (1.0, 2)


def test_a_long_node_weighs_more_in_the_spread() -> None:
    steady, restless = [(10.0, 0.0, 0.0)] * 4, [(0.1, 0.0, 0.0), (0.3, 0.0, 0.0)] * 2
    assert overall_spread({"long": steady, "short": restless}) < 0.02
    assert overall_spread({"long": [(t * 50, 0.0, 0.0) for t, *_ in restless], "short": steady}) > 0.1


class Card:
    """A GPU as a host sees it: it works off what was launched, in order, and its events know its own time."""

    def __init__(self) -> None:
        self.free = 0.0

    def run(self, seconds: float) -> None:
        self.free = max(self.free, perf_counter()) + seconds

    def event(self, *_: Any, **__: Any) -> Any:
        card = self

        class Event:
            def record(self) -> None:
                self.at = max(card.free, perf_counter())

            def synchronize(self) -> None:
                sleep(max(0.0, self.at - perf_counter()))

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.at - self.at)

        return Event()


def test_seconds_of_a_gpu_have_no_part_in_which_the_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, events surrounded a node on an empty stream: here 8 ms of launching beside 1 ms of kernels."""
    card = Card()
    monkeypatch.setattr(torch, "Event", card.event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: sleep(max(0.0, card.free - perf_counter())))
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(profile, "keep_busy", card.run)

    def node() -> None:
        sleep(8e-3)
        card.run(1e-3)

    clock = StreamClock(torch.device("cuda:0"))
    times = [clock(node) for _ in range(5)]
    assert times[0] > 5e-3, "the first launch is longer than any before"
    assert max(times[1:]) < 2e-3
    clock.begin(2)
    assert clock(node) < 2e-3, "as long as in the sweep before"


def test_a_gpu_is_not_kept_busy_for_the_longest_launch_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the launch that loads a kernel, of 10 ms and more, made each later measurement of a node 20 ms long: 1000 nodes in 7 sweeps
    took minutes.
    """
    card, busy = Card(), list[float]()
    monkeypatch.setattr(torch, "Event", card.event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(profile, "keep_busy", busy.append)
    now, pauses = [0.0], iter([0.02, 0.0, 0.0, 0.002, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    clock = StreamClock(torch.device("cuda:0"))
    runs = profile._RunCount(Task(""), 3, clock.begin)

    def once() -> dict[str, Any]:
        for _ in range(2):
            clock(lambda: now.append(now.pop() + next(pauses)))
        return {}

    for _ in range(4):
        runs.of_sweep(once)
    shortest = 2 * profile.LAUNCH_SECONDS
    assert busy[:4] == [shortest] * 4, "the warm-up does not count"
    assert busy[4:6] == pytest.approx([4e-3] * 2), "as long as in the sweep before"
    assert busy[6:] == [shortest] * 2, "the sweep before had no such launch"


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_weight_that_the_graph_writes_through_its_data_comes_back(is_moved: bool) -> None:
    """`weight.data` is another tensor, whose writes leave no new version of the weight."""

    class Decays(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if is_moved:
                self.weight.data = self.weight.data * 0.5
            else:
                self.weight.data.mul_(0.5)
            return super().forward(x)

    graph, x = trace(Decays(2, 2), torch.ones(3, 2)), torch.ones(3, 2)
    before, memory = graph.weight.detach().clone(), graph.weight.data_ptr()
    profiled_costs(graph, [x], repeats=QUICK)
    assert torch.equal(graph.weight, before)
    assert graph.weight.data_ptr() == memory
