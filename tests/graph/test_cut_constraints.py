"""What the user forces on the cut is done, marked and priced; what cannot be meant is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.cut_constraints import CutConstraints
from pipecompile.tracing.node_facts import facts
from tests.support.eager import square_loss
from tests.support.models import UNet

X = torch.randn(8, 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Six blocks and a head; even stages have two blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Block() for _ in range(6)])
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def compiled(model: nn.Module | None = None, n_stages: int = 3, x: torch.Tensor = X, **options: object) -> pc.Pipeline:
    return pc.compile(
        model or Net(), n_stages, example_args=(x,), n_microbatches=4, devices=["cpu"] * n_stages, cost="analytic",
        loss_fn=square_loss, **options,
    )  # fmt: skip


def stages_of(pipe: pc.Pipeline, module: str) -> set[int]:
    """The stages of the calls of a module and of all inside it."""
    inside = f"{module}."
    return {
        pipe.plan.stage_of[node.name]
        for node in pipe.graph.graph.nodes
        if node.name in pipe.plan.stage_of
        and any(f"{path}.".startswith(inside) for path in (str(node.target), facts(node).module))
    }


def test_nothing_forced_has_no_marks_and_no_price() -> None:
    plan = compiled().plan
    assert plan.price is None
    assert all(stage.forced == () for stage in plan.stages)
    assert not CutConstraints()


def test_a_pin_is_kept_marked_and_priced() -> None:
    free, pipe = compiled(), compiled(pin={"layers.3": 0})
    assert stages_of(pipe, "layers.3") == {0}
    plan = pipe.plan
    assert plan.stages[0].forced == ("pin layers.3",)
    assert plan.unforced == pytest.approx(free.plan.bottleneck)
    assert plan.bottleneck > free.plan.bottleneck * 1.5
    assert plan.price == pytest.approx(plan.bottleneck / free.plan.bottleneck - 1)
    table = " ".join(str(pipe).split())
    assert "pin layers.3" in table
    assert f"the constraints make the slowest stage {plan.price:.1%} slower" in table
    assert pc.Plan.from_json(plan.to_json()) == plan


def test_what_costs_nothing_has_the_price_zero() -> None:
    free = compiled()
    stage = free.plan.stage_of["head"]
    assert compiled(pin={"head": stage}).plan.price == 0


def test_a_split_begins_a_stage() -> None:
    pipe = compiled(split_before=["layers.1", "layers.5"])
    assert stages_of(pipe, "layers.0") == {0}
    assert stages_of(pipe, "layers.1") == {1} == stages_of(pipe, "layers.4")
    assert stages_of(pipe, "layers.5") == {2}
    assert pipe.plan.stages[1].forced == ("split before layers.1",)
    assert pipe.plan.price is not None
    assert pipe.plan.price > 0.5


def test_modules_lists_and_classes_are_kept_together() -> None:
    many = compiled(n_stages=4, keep_together=[Block])
    assert all(len(stages_of(many, f"layers.{i}")) == 1 for i in range(6))
    listed = compiled(keep_together=[["layers.1", "layers.4"]])
    assert stages_of(listed, "layers.1") == stages_of(listed, "layers.4") == stages_of(listed, "layers.2")
    whole = compiled(n_stages=2, keep_together=["layers"])
    assert len(stages_of(whole, "layers")) == 1
    assert any("together layers" in stage.forced for stage in whole.plan.stages)


def test_a_balance_is_that_of_the_children() -> None:
    layers = nn.Sequential(*[Block() for _ in range(6)])
    pipe = compiled(layers, balance=[1, 1, 4])
    assert [stages_of(pipe, str(i)) for i in range(6)] == [{0}, {1}, {2}, {2}, {2}, {2}]
    assert all("balance" in stage.forced for stage in pipe.plan.stages)


def test_a_forced_cut_computes_what_eager_does() -> None:
    torch.manual_seed(0)
    model, x = UNet(), torch.randn(4, 3, 16, 16)
    pipe = compiled(model, 2, x, split_before=["down.2"])
    wanted = sum(square_loss(model(part)) for part in x.split(1)) / 4
    assert pipe.step(x) == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pin": {"haed": 1}}, "'head'"),
        ({"pin": {"head": 3}}, "a stage from 0 to 2"),
        ({"split_before": "head"}, r"split_before=\['head'\]"),
        ({"split_before": ["layers.0"]}, "nothing runs before 'layers.0'"),
        ({"keep_together": [nn.Conv2d]}, "no Conv2d"),
        ({"keep_together": [[]]}, "a list in it is empty"),
        ({"balance": [1, 1]}, "one entry per stage: 2 for 3"),
        ({"balance": [1, 1, 1]}, "adds up to 3, the model has 2 children"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(pc.InputError, match=text):
        compiled(**options)


def test_what_contradicts_itself_is_told_with_the_reason() -> None:
    with pytest.raises(pc.InfeasibleError, match="pinned to stage") as caught:
        compiled(pin={"layers.4": 0, "layers.1": 2})
    assert "no cut into 3 stages meets the constraints" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"balance": [1, 1], "pin": {"head": 0}}, "pin has 'head' in stage 0, and balance has 'head' in stage 1"),
        ({"pin": {"layers": 0, "layers.5": 1}}, "pin has 'layers' in stage 0, and pin has 'layers.5' in stage 1"),
        ({"pin": {"layers.5": 1, "layers": 0}}, "pin has 'layers.5' in stage 1, and pin has 'layers' in stage 0"),
    ],
)
def test_two_stages_for_one_node_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(pc.InputError, match=text):
        compiled(n_stages=2, **options)


def test_two_names_may_have_the_same_stage() -> None:
    pipe = compiled(n_stages=2, balance=[1, 1], pin={"layers.5": 0, "head": 1})
    assert (stages_of(pipe, "layers"), stages_of(pipe, "head")) == ({0}, {1})


class Spare(Net):
    """A net with a block and a dropout that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.dropout = Block(), nn.Dropout()


def test_modules_of_a_class_that_do_not_run_are_left_out() -> None:
    pipe = compiled(Spare(), keep_together=[Block])
    assert all(len(stages_of(pipe, f"layers.{number}")) == 1 for number in range(6))
    assert not any("spare" in mark for stage in pipe.plan.stages for mark in stage.forced)
    with pytest.raises(pc.InputError, match="called 'dropout'"):
        compiled(Spare(), keep_together=[nn.Dropout])
    with pytest.raises(pc.InputError, match="called 'spare'"):
        compiled(Spare(), keep_together=["spare"])


def test_own_costs_move_the_cut() -> None:
    free, slow = compiled(n_stages=2), compiled(n_stages=2, costs={"layers.0": 1.0})
    assert stages_of(free, "layers.2") == {0}
    assert stages_of(slow, "layers.0") == {0, 1}  # its two halves weigh more than all the rest
    assert slow.plan.cost == "analytic and user"
    assert sum(stage.forward + stage.backward for stage in slow.plan.stages) == pytest.approx(1.0, rel=1e-3)
    for given in ({"layers.0": -1.0}, {"layers.0": "1"}):
        with pytest.raises(pc.InputError, match=r"costs=.*finite number of seconds"):
            compiled(costs=given)


def test_a_function_gives_all_costs() -> None:
    from pipecompile.costs import NodeCost

    def even(graph: torch.fx.GraphModule, _inputs: object) -> dict[str, NodeCost]:
        return {node.name: NodeCost(1.0, 2.0, 0, 0) for node in graph.graph.nodes if node.op.startswith("call_")}

    plan = compiled(n_stages=5, costs=even).plan
    assert plan.cost == "user"
    assert sum(stage.nodes for stage in plan.stages) == 25
    assert plan.step is not None
    assert (plan.step.first_bottleneck, plan.step.seconds <= plan.step.first_seconds) == (5 * 3.0, True)
    with pytest.raises(pc.InputError, match="no NodeCost for 25 nodes"):
        compiled(costs=lambda graph, inputs: {})


def test_a_slower_device_gets_less_and_a_slow_link_no_cut() -> None:
    plan = compiled(n_stages=2, speeds=[1.0, 0.2]).plan
    first, second = (stage.nodes for stage in plan.stages)
    assert first > 3 * second
    wide = [nn.Linear(512, 512) for _ in range(4)]
    waist = nn.Sequential(wide[0], nn.Linear(512, 2), nn.Linear(2, 512), *wide[1:])
    x = torch.randn(64, 512)
    fast, slow = (compiled(waist, 2, x, bandwidth=bandwidth).plan for bandwidth in (1e15, 1e9))
    assert fast.stage_of == {"_0": 0, "_1": 0, "_2": 0, "_3": 0, "_4": 1, "_5": 1}
    assert slow.stage_of == {"_0": 0, "_1": 0, "_2": 1, "_3": 1, "_4": 1, "_5": 1}


def test_links_differ_by_pair() -> None:
    fast = 1e15
    rows = [[fast] * 3 for _ in range(3)]
    rows[0][1] = rows[1][0] = 1e3
    pipe = compiled(bandwidth=rows)
    problem = pipe.problem
    assert problem is not None
    assert problem.links is not None
    assert problem.links[0][1] == pytest.approx(1e12)
    assert problem.links[1][2] == 1.0
    ends = {(route.source, end) for route in pipe.plan.routes if route.source >= 0 for end in route.consumers}
    assert (0, 1) not in ends  # stage 1, or stage 0, stays empty rather
    with pytest.raises(pc.InputError, match="3 by 3 square"):
        compiled(bandwidth=[[1.0]])


def test_a_plan_and_a_force_do_not_go_together() -> None:
    plan = compiled().plan
    with pytest.raises(pc.InputError, match="constraints on the cut"):
        compiled(plan=plan, pin={"head": 2})
