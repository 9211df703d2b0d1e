"""What a user of PyTorch expects of the object that `compile` returns."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same
from tests.support.models import UNet

pytestmark = pytest.mark.smoke


class Net(nn.Module):
    """Small, with everything that matters: BatchNorm, a skip over stages, an unused parameter, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.second, self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.third.bias = self.second.bias

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        skip = torch.relu(self.norm(self.first(x)))
        return self.last(self.third(torch.relu(self.second(skip))) * scale + skip)


def pair(seed: int = 0) -> tuple[Net, Net]:
    torch.manual_seed(seed)
    model = Net()
    return model, copy.deepcopy(model)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def piped(model: nn.Module, n_stages: int = 3, **options: object) -> pc.Pipeline:
    options = {
        "cost": "analytic",
        "devices": ["cpu"] * n_stages,
        "loss_fn": F.cross_entropy,
        "n_microbatches": 4,
        "tied": "together",
    } | options
    return pc.compile(model, n_stages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_step_is_the_micro_batched_loop_bit_for_bit(dispatch: str, schedule: str) -> None:
    model, eager = pair()
    x, target = batch(9)
    pipe = piped(model, dispatch=dispatch, schedule=schedule)
    for _ in range(3):
        loss = pipe.step(x, target=target)
        assert not loss.requires_grad
        assert torch.equal(loss, accumulate(eager, x, 4, F.cross_entropy, target))
        assert_same(model, eager)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_has_the_loss_and_leaves_gradients_alone(dispatch: str, mode: type) -> None:
    """The first step, one between two training steps in train mode, where statistics are updated, and one in eval mode."""
    model, eager = pair()
    x, target = batch(9)

    def loss_and_aux(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, int]]]:  # fmt: skip
        return F.cross_entropy(output, target), {"right": ((output.argmax(1) == target).sum(), len(target))}

    pipe = piped(model, dispatch=dispatch, loss_fn=loss_and_aux, has_aux=True, batch_norm="each")
    for is_training, trains in ((True, False), (True, True), (True, False), (False, False), (True, True)):
        pipe.train(is_training)
        eager.train(is_training)
        with torch.enable_grad() if trains else mode():
            loss, aux = pipe.step(x, target=target)
            parts = [eager(part) for part in torch.tensor_split(x, 4)]
            pairs = [*zip(parts, torch.tensor_split(target, 4), strict=True)]
            losses = [F.cross_entropy(output, part) * (len(part) / 9) for output, part in pairs]
            assert torch.equal(loss, sum(losses[1:], start=losses[0]))
            assert sum(right["right"][0] for right in aux) == sum((o.argmax(1) == part).sum() for o, part in pairs)
        if trains:
            sum(losses[1:], start=losses[0]).backward()
            assert_same(model, eager, 1e-6)
        assert_same(model, eager, 1e-6)
        assert not any(parameter.is_inference() for parameter in model.parameters())


def test_the_program_and_the_timeline_stay_those_of_the_last_training_step() -> None:
    pipe = piped(pair()[0])
    x, target = batch()
    pipe.step(x, target=target)
    program, measured = pipe.program, pipe.measured
    with torch.no_grad():
        pipe.eval().step(x[:3], target=target[:3])
    assert pipe.program is program
    assert pipe.measured == measured


FACE = ["clip_grad_norm_", "considered", "devices", "dispatch", "draw", "dump", "evaluate", "explain", "full_state_dict", "gathered", "graph", "load_optimizer_state_dict", "measured",
        "model", "needs_inputs", "needs_targets", "no_sync", "optimizer_state_dict", "plan", "prepare", "problem", "program", "report", "reschedule", "schedule", "simulate",
        "stages", "step", "sum_over_copies"]  # fmt: skip


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_user_sees_a_list_of_names_beside_those_of_a_module(is_compiled: bool) -> None:
    """All other names begin with an underscore, before and after the first call."""
    pipe = piped(pair()[0])
    if is_compiled:
        x, target = batch()
        pipe.step(x, target=target)
    added = set(dir(pipe)) - set(dir(nn.Module()))
    assert sorted(name for name in added if not name.startswith("_")) == FACE
    assert pipe.model is not None
    for name in set(FACE) - {"model"}:
        assert inspect.getdoc(inspect.getattr_static(type(pipe), name)), name


def planned_for_a_cluster() -> tuple[object, ...]:
    planned = pc.plan_for(
        nn.Linear(8, 8), "2xH100", example_args=(torch.empty(4, 8, device="meta"),), schedules=("1f1b",)
    )
    return planned, planned.rows[0], planned.cluster


def periodic() -> tuple[pc.PeriodicSchedule, pc.PeriodicProgram, pc.SteadyState]:
    schedule = pc.build_periodic("1f1b", 4, 64)
    return schedule, pc.lower_periodic(schedule), pc.simulate_periodic(schedule)


def test_every_public_object_is_one_short_line() -> None:
    pipe = piped(pair()[0], n_microbatches="auto", schedule="1f1b", example_args=batch()[:1])
    plan, problem, considered = pipe.plan, pipe.problem, pipe.considered
    assert problem is not None
    assert considered is not None
    schedule = pc.build_schedule("1f1b", 2, 64)
    cut = pc.partition(problem, 3)
    made = [pipe, plan, problem, considered, considered.best, pipe.program, schedule, pc.simulate(schedule), pc.forecast(schedule), cut,
            pc.explain(Net(), batch()[0]), *pc.advise(schedule), pc.Microbatch(1, target=2),
            (report := pc.check_order(schedule)), report.order, *planned_for_a_cluster(), *periodic(), pc.CardPartition(torch.device("cuda", 0), 0, 4, 33, None), pc.UserPass(lambda program: program, "mine", before="compute")]  # fmt: skip
    errors = [pc.InputError("what", why="why", hint="hint"), pc.MismatchError("what"), pc.RunError("what", stage=1, microbatch=2), pc.CostError("what"),
              pc.InfeasibleError("what"), pc.PartitionError("what"), pc.PlanError("what"), pc.ScheduleError("what"),
              pc.PipecompileError("what"), pc.VerifyError("plan", ["a fault"]), pc.TraceError("what"),
              pc.PartitionWarning("what"), pc.RecordingWarning("what"), pc.LostCopyWarning("what")]  # fmt: skip
    classes = {name for name in pc.__all__ if isinstance(getattr(pc, name), type)}
    assert {type(each).__name__ for each in (*made, *errors)} == classes
    for each in (*made, *errors):
        text = repr(each)
        assert "\n" not in text, text
        assert len(text) < 400, text
        assert text.startswith(type(each).__name__), text


def test_lazy_until_the_first_call() -> None:
    model, eager = pair()
    pipe = piped(model)
    assert "first call" in repr(pipe)
    assert str(pipe) == repr(pipe)
    with pytest.raises(pc.InputError, match="not compiled yet"):
        _ = pipe.plan
    x, _ = batch()
    parts = [eager(part) for part in torch.tensor_split(x, 4)]
    assert torch.equal(pipe(x), torch.cat(parts))
    assert pipe.plan.n_stages == 3


def test_optimizer_built_before_compiling_trains_the_pipeline() -> None:
    model, eager = pair()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    x, target = batch()
    pipe = piped(model, example_args=(x,))
    for _ in range(3):
        pipe.step(x, target=target)
        accumulate(eager, x, 4, F.cross_entropy, target)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]


def test_state_dict_is_the_models_both_ways() -> None:
    model, other = pair()
    pipe = piped(model, example_args=batch()[:1])
    assert list(pipe.state_dict()) == list(other.state_dict())
    assert pipe.state_dict()["third.bias"].data_ptr() == pipe.state_dict()["second.bias"].data_ptr()
    for value in other.state_dict().values():
        value.add_(1)
    pipe.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(pipe.state_dict(), strict=True)
    assert torch.equal(model.first.weight, other.first.weight)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_train_and_eval_switch_without_a_new_plan() -> None:
    model, eager = pair()
    x, target = batch()
    pipe = piped(model, example_args=(x,))
    plan = pipe.plan
    pipe.step(x, target=target)
    accumulate(eager, x, 4, F.cross_entropy, target)
    pipe.eval()
    eager.eval()
    assert not model.training
    with torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([eager(part) for part in torch.tensor_split(x, 4)]))
    assert pipe.plan is plan
    pipe.train()
    eager.train()
    pipe.step(x, target=target)
    accumulate(eager, x, 4, F.cross_entropy, target)
    assert_same(model, eager)


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 13])
def test_any_batch_size_without_tracing_again(samples: int) -> None:
    model, eager = pair()
    model.eval(), eager.eval()  # BatchNorm refuses to train on one sample
    pipe = piped(model, example_args=batch(8)[:1])
    graph = pipe.graph
    x, target = batch(samples)
    pipe.step(x, target=target)
    accumulate(eager, x, min(4, samples), F.cross_entropy, target)
    assert_same(model, eager)
    assert pipe.graph is graph
    assert pipe.program.n_microbatches == min(4, samples)


def test_call_then_backward_equals_eager() -> None:
    model, eager = pair()
    x, target = batch()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(piped(model)(mine), target).backward()
    parts = [eager(part) for part in torch.tensor_split(theirs, 4)]
    F.cross_entropy(torch.cat(parts), target).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_step_returns_gradients_of_its_inputs() -> None:
    model, eager = pair()
    x, target = batch()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    piped(model).step(mine, target=target)
    accumulate(eager, theirs, 4, F.cross_entropy, target)
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_two_forwards_before_their_backwards() -> None:
    model, eager = pair()
    pipe = piped(model.eval())
    x, y = batch(8)[0], batch(6)[0]
    (pipe(x).sum() * pipe(y).sum()).backward()
    eager.eval()
    (eager(x).sum() * eager(y).sum()).backward()
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad, rtol=1e-4, atol=1e-5)


def test_second_backward_and_double_backward_are_refused() -> None:
    model, _ = pair()
    x = batch()[0].requires_grad_()
    out = piped(model)(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(pc.InputError, match="second time"):
        out.sum().backward()
    with pytest.raises(pc.InputError, match="differentiated twice"):
        torch.autograd.grad(piped(model)(x).sum(), x, create_graph=True)


def test_plain_arguments_pass_through_and_are_part_of_the_recording() -> None:
    model, eager = pair()
    x, _ = batch()
    pipe = piped(model.eval())
    eager.eval()
    for scale in (1.0, 2.0, 1.0):
        torch.testing.assert_close(pipe(x, scale=scale), eager(x, scale=scale))
    assert len(pipe._cache.entries) == 2


def test_sum_reduction_and_loss_without_target() -> None:
    model, eager = pair()
    x, _ = batch(7)
    loss = piped(model.eval(), loss_fn=lambda out: out.square().sum(), loss_reduction="sum").step(x)
    whole = eager.eval()(x).square().sum()
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(model.last.weight.grad, eager.last.weight.grad)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.b(self.a(x).relu())
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_loss_inside_the_model() -> None:
    model = WithLoss()
    eager = copy.deepcopy(model)
    x, labels = batch(7)
    pipe = piped(model, 2, loss_fn=None)
    loss = pipe.step(x, labels=labels)
    whole = eager(x, labels)["loss"]
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(model.a.weight.grad, eager.a.weight.grad)
    out = pipe(x, labels=labels)
    torch.testing.assert_close(out["loss"], whole.detach())
    assert out["logits"].shape == (7, 4)


def test_the_loss_of_a_step_says_that_its_backward_has_run(tmp_path: Path) -> None:
    """It is a plain tensor otherwise, also in files that are loaded without code."""
    pipe, (x, y) = piped(pair()[0], batch_norm="each"), batch()
    losses = pipe.step(x, target=y), pipe.step(microbatches=[(x, y)])
    for loss in losses:
        with pytest.raises(pc.InputError, match=r"(?s)backward\(\) on the loss that step returned.*optimizer.step\(\)"):
            loss.backward()
    torch.save(losses[0], tmp_path / "loss.pt")
    assert torch.equal(torch.load(tmp_path / "loss.pt"), losses[0])
    (copy.deepcopy(losses[0]).requires_grad_() * 2).backward()


def test_nested_targets_are_taken_apart() -> None:
    model, eager = pair()
    x, target = batch()

    def loss_fn(out: torch.Tensor, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(out, wanted["label"], reduction="none").mul(wanted["weight"]).mean()

    weight = torch.rand(8)
    loss = piped(model.eval(), loss_fn=loss_fn).step(x, target={"label": target, "weight": weight})
    whole = loss_fn(eager.eval()(x), {"label": target, "weight": weight})
    torch.testing.assert_close(loss, whole.detach())


def test_a_schedule_from_csv_runs(tmp_path: Path) -> None:
    model, eager = pair()
    x, target = batch()
    text = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    pipe = piped(model, schedule=pc.Schedule.from_csv(text), example_args=(x,))
    pipe.step(x, target=target)
    accumulate(eager, x, 4, F.cross_entropy, target)
    assert_same(model, eager)
    assert pipe.schedule.to_csv() == text
    pipe.schedule.save(tmp_path / "mine.csv")
    other = piped(pair()[0], schedule=str(tmp_path / "mine.csv"), example_args=(x,))
    assert other.schedule == pipe.schedule
    assert other.reschedule("gpipe").reschedule(tmp_path / "mine.csv").schedule == pipe.schedule


def test_a_saved_plan_is_used_as_it_is(tmp_path: object) -> None:
    model, _ = pair()
    x, _ = batch()
    pipe = piped(model, example_args=(x,))
    plan = pipe.plan
    assert pipe.problem is not None
    assert pc.partition(pipe.problem, 3).bottleneck == pytest.approx(plan.bottleneck)
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    again = piped(copy.deepcopy(model), example_args=(x,), plan=path, cost="profile")
    assert again.plan == plan
    assert again.problem is None


def test_deferred_and_eager_profile_agree_on_what_is_left_behind() -> None:
    """Profiling runs the model for real, and leaves no trace."""
    model, before = pair()
    state = torch.get_rng_state()
    pipe = piped(model, cost="profile", example_args=batch()[:1])
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model, before)
    assert pipe.plan.cost == "profile"
    assert all(stage.forward > 0 for stage in pipe.plan.stages)


def test_autocast_around_step_reaches_every_stage() -> None:
    model, eager = pair()
    x, target = batch()
    for dispatch in ("inline", "threads"):
        model.zero_grad(), eager.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = piped(model, dispatch=dispatch).step(x, target=target)
            expected = accumulate(eager, x, 4, F.cross_entropy, target)
        assert torch.equal(loss, expected)
        assert_same(model, eager)


def test_moving_to_a_device_is_refused_and_a_dtype_is_not() -> None:
    model, eager = pair()
    pipe = piped(model, example_args=batch()[:1])
    with pytest.raises(pc.InputError, match="cannot be moved"):
        pipe.to("meta")
    pipe.double().eval()
    x = batch()[0].double()
    torch.testing.assert_close(pipe(x), eager.double().eval()(x))


def test_simulate_measure_and_dump(tmp_path: object) -> None:
    model, x = UNet(), torch.randn(8, 3, 32, 32)
    pipe = piped(model, 4, example_args=(x,), loss_fn=lambda out: out.square().mean())
    assert pipe.measured is None
    assert "bottleneck" in str(pipe)
    predicted = pipe.simulate()
    assert 0 < predicted.bubble < 1
    assert all(peak > 0 for peak in predicted.peak_memory)
    pipe.step(x)
    assert pipe.measured is not None
    assert [span.name for span in pipe.measured.compute(1)] == [str(action) for action in pipe.schedule.rows[1]]
    names = {path.name for path in pipe.dump(str(tmp_path))}
    assert {
        "plan.json",
        "schedule.csv",
        "program.txt",
        "timeline.json",
        "timeline.svg",
        "graph.dot",
        "graph.txt",
        "report.html",
    } <= names
    assert pc.Plan.load(f"{tmp_path}/plan.json") == pipe.plan


def test_a_pipeline_inside_a_larger_model() -> None:
    model, eager = pair()
    x, _ = batch()
    outer = nn.Sequential(nn.Linear(8, 8), piped(model.eval()), nn.Linear(4, 2))
    plain = nn.Sequential(copy.deepcopy(outer[0]), eager.eval(), copy.deepcopy(outer[2]))
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer(x).sum().backward()
    plain(x).sum().backward()
    for mine, other in zip(outer.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


class Regions(nn.Module):
    """Grad and autocast regions, and a functional dropout whose mode is a submodule's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.no_grad():
            scale = self.b(x).mean(1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float()) * scale.float()
        if self.b.training:
            x = x * 2
        return self.c(x)


def test_regions_and_modes_are_those_of_the_call_not_of_the_first_one() -> None:
    torch.manual_seed(0)
    model = Regions()
    eager = copy.deepcopy(model)
    x, target = batch()
    pipe = piped(model)
    with torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([eager(part) for part in torch.tensor_split(x, 4)]))
    for autocast in (False, True, False):
        for training in (True, False):
            model.b.train(training), eager.b.train(training)
            model.zero_grad(), eager.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert torch.equal(pipe.step(x, target=target), accumulate(eager, x, 4, F.cross_entropy, target))
            assert_same(model, eager)


def test_nothing_to_train_needs_no_backward() -> None:
    model, eager = pair()
    x, target = batch()
    pipe = piped(model.eval().requires_grad_(False))
    with torch.inference_mode():
        first = pipe(x)
    out = pipe(x)
    assert torch.equal(first, out)
    assert not out.requires_grad
    model.last.weight.requires_grad_()
    pipe.step(x, target=target)
    eager.eval()
    accumulate(eager, x, 4, F.cross_entropy, target)
    assert torch.equal(model.last.weight.grad, eager.last.weight.grad)  # type: ignore[arg-type]
    assert model.first.weight.grad is None


def test_a_pipeline_without_a_loss_can_be_looked_at() -> None:
    model, _ = pair()
    pipe = piped(model, example_args=batch()[:1], loss_fn=None)
    assert "bottleneck" in str(pipe)
    assert pipe.schedule.name == "1f1b"
    with pytest.raises(pc.InputError, match="needs a loss"):
        pipe.step(batch()[0])


def test_another_schedule_on_the_same_recording() -> None:
    model, eager = pair()
    x, target = batch()
    pipe = piped(model, example_args=(x,))
    graph = pipe.graph
    pipe.step(x, target=target)
    accumulate(eager, x, 4, F.cross_entropy, target)
    pipe.reschedule("gpipe", 2).step(x, target=target)
    accumulate(eager, x, 2, F.cross_entropy, target)
    assert_same(model, eager)
    assert pipe.graph is graph
    assert (pipe.schedule.name, pipe.schedule.n_microbatches) == ("gpipe", 2)
    with pytest.raises(pc.ScheduleError, match="nonsense"):
        pipe.reschedule("nonsense")
    assert pipe.schedule.name == "gpipe"


class Unrolled(nn.Module):
    """Python walks over the samples, so a recording holds for one batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.stack([self.a(sample).relu() for sample in x]))


def test_a_recording_for_one_batch_size_gives_back_every_sample() -> None:
    model = Unrolled()
    x, _ = batch(6)
    out = piped(model, 2, n_microbatches=2)(x)
    torch.testing.assert_close(out, model(x))
    with pytest.warns(pc.RecordingWarning, match="3 micro-batches instead of 4"):
        torch.testing.assert_close(piped(model, 2, n_microbatches=4)(x), model(x))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.armed = False
        self.b.register_forward_pre_hook(self.fail)

    def fail(self, *_: object) -> None:
        if self.armed:
            raise ZeroDivisionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = self.b(x)
        return self.b(self.a(x)) + y


def test_a_failure_inside_a_region_does_not_leave_its_state_behind() -> None:
    model = Failing()
    x, target = batch()
    pipe = piped(model, 2)
    pipe.step(x, target=target)
    model.armed = True
    with pytest.raises(pc.RunError):
        pipe.step(x, target=target)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
