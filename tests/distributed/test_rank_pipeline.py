"""Pipelines on a mesh of one rank: the whole way of a step without other processes. The cases of cases.py have four ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import pipecompile as pc
from pipecompile.distributed import rank_code
from pipecompile.distributed.rank_pipeline import RankPipeline
from pipecompile.errors import InputError, RunError
from pipecompile.graph.colocation import ties_of
from pipecompile.torch_private.dtensors import whole_of
from tests.runtime.test_failed_backward import Spoilt, place

pytestmark = pytest.mark.usefixtures("single_rank")

SAMPLES = torch.randn(6, 4)
SCRIPTS = [
    "not finite",
    "other norm",
    "rescheduled",
    "loaded on one",
    "failed load",
    "read beside steps",
    "evaluated beside steps",
    "other default device",
    "skipped",
    "failed to record",
    "copies of stages",
    "copies of stages on one",
]


def compiled(model: nn.Module, names: Sequence[str] = ("pp",), **options: Any) -> RankPipeline:
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=tuple(names))
    defaults = {
        "n_microbatches": 2,
        "cost": "analytic",
        "batch_norm": "each",
        "loss_fn": lambda y: y.square().mean(),
        "example_args": (SAMPLES,),
    }
    pipe = pc.compile(model, 1, mesh=mesh, **defaults | options)
    assert isinstance(pipe, RankPipeline)
    return pipe


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Scaled(nn.Module):
    """A parameter of its own, which becomes a DTensor, times what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_layers_may_return_dtensors() -> None:
    """Such a result, and a parameter in a module of the user's own, was recorded as a constant, with fake tensors in it, which a step
    computed with. A mesh was taken apart into its tensors, which differ between ranks. They stay in a stage: a mesh is of its ranks.
    """
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    eager = nn.Sequential(nn.LayerNorm(4), Scaled(), block, nn.Tanh(), nn.Linear(4, 4))
    model, mesh = copy.deepcopy(eager), init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    plan = {
        "0": SequenceParallel(),
        "1": SequenceParallel(),
        "2": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "2.0": ColwiseParallel(use_local_output=False),
        "2.2": RowwiseParallel(),
    }
    pipe = compiled(parallelize_module(model, mesh["tp"], plan), ("pp", "tp"))
    expected = eager(SAMPLES).square().mean()
    expected.backward()
    torch.testing.assert_close(pipe.step(SAMPLES), expected.detach())
    for (name, parameter), other in zip(pipe.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(whole_of(parameter.grad), other.grad, msg=name)
    graph = pipe._cache.latest.graph
    assert "built" not in [node.name for node in graph.graph.nodes]
    assert graph.facts.batch_size is None
    with torch.no_grad():  # rows of samples stay apart
        torch.testing.assert_close(pipe(SAMPLES), eager(SAMPLES))
    assert [group[-1] for group in ties_of(graph).groups] == ["_2_2"]


def test_results_of_collectives_are_awaited_where_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait was within the sending, and the rank that was sent the value was blamed for one of `tp` that had stopped."""
    pipe, awaited = compiled(nn.Linear(4, 4)), list[torch.Tensor]()
    monkeypatch.setattr(rank_code, "waited", awaited.append)
    with torch.no_grad():
        pipe(SAMPLES)
    assert [value.shape for value in awaited] == [(3, 4), (3, 4)]


def test_a_loss_may_be_a_dtensor() -> None:
    """Its backward failed in `loss_parallel`, for want of a DTensor to begin with."""
    eager, target = nn.Linear(4, 3), torch.tensor([0, 1, 2, 0, -100, -100])
    model, mesh = copy.deepcopy(eager), init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    parallelize_module(model, mesh["tp"], ColwiseParallel(use_local_output=False))
    pipe = compiled(model, ("pp", "tp"), loss_fn=cross_entropy)
    with loss_parallel():
        loss = pipe.step(SAMPLES, target=target)
    expected = cross_entropy(eager(SAMPLES), target)
    expected.backward()
    assert type(loss) is torch.Tensor
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.weight.grad.full_tensor(), eager.weight.grad)


def test_a_step_has_the_loss_and_gradients_of_eager() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe = compiled(copy.deepcopy(eager))
    loss = pipe.step(SAMPLES)
    expected = eager(SAMPLES).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for own, other in zip(pipe.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    norm = pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(eager.parameters(), 0.1))
    torch.testing.assert_close(next(pipe.parameters()).grad, next(eager.parameters()).grad)


def test_a_norm_that_is_not_finite_is_an_error_on_request() -> None:
    pipe = compiled(layers())
    next(pipe.parameters()).grad = torch.full((4, 4), torch.inf)
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_call_gives_the_output_without_gradients_and_is_refused_with_them() -> None:
    pipe = compiled(layers())
    with pytest.raises(InputError, match="has no backward"):
        pipe(SAMPLES)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(SAMPLES), pipe.model(SAMPLES))


def test_the_timeline_of_all_ranks_is_shown_until_the_next_step() -> None:
    pipe = compiled(layers())
    assert pipe.gathered() is None
    pipe.step(SAMPLES)
    timeline = pipe.gathered()
    assert timeline is not None
    assert [span.name for span in timeline.spans] == ["0F0", "0B0", "0F1", "0B1"]
    assert pipe.measured == timeline
    assert pipe.clock_error == 0.0


def test_states_are_those_of_the_model() -> None:
    model = layers()
    pipe, expected = compiled(model), copy.deepcopy(model.state_dict())
    assert list(pipe.state_dict()) == list(expected)
    full = pipe.full_state_dict()
    assert all(torch.equal(full[key], value) for key, value in expected.items())
    pipe.load_state_dict({key: value + 1 for key, value in expected.items()})
    assert torch.equal(model[0].weight, expected["0.weight"] + 1)
    with pytest.raises(RuntimeError, match=r"missing \['0.weight'\], unexpected \['3.weight'\]"):
        pipe.load_state_dict({("3" if key == "0.weight" else key[:1]) + key[1:]: v for key, v in expected.items()})


def test_tensors_live_on_their_rank() -> None:
    pipe = compiled(layers())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in pipe.model.named_parameters()]
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in pipe.model.named_buffers()]
    assert all(pipe._is_here(tensor) for tensor in pipe.parameters())


def test_a_user_sees_what_a_pipeline_has_and_what_ranks_add() -> None:
    pipe = compiled(layers())
    added = {"copies", "clock_error", "torch_stages", "replicas"}
    alone = pc.compile(layers(), 1, devices=["cpu"], example_args=(SAMPLES,), n_microbatches=2, batch_norm="each")
    assert {name for name in set(dir(pipe)) - set(dir(alone)) if not name.startswith("_")} == added


def test_a_failed_pipeline_is_to_be_started_again() -> None:
    model = layers()
    pipe = compiled(model)

    def fail(*_: object) -> None:
        raise ValueError("the data are wrong")

    handle = model[2].register_forward_pre_hook(fail)
    with pytest.raises(RunError, match="stage 0 failed in forward of micro-batch 0: ValueError: the data are wrong"):
        pipe.step(SAMPLES)
    handle.remove()
    with pytest.raises(RunError, match="this pipeline failed before") as caught:
        pipe.step(SAMPLES)
    assert "rank 0 failed at 0F0: stage 0 failed in forward" in caught.value.why


def test_a_shard_mesh_of_one_rank_keeps_parameters_whole() -> None:
    pipe = compiled(layers(), ("dp_shard", "pp"))
    assert not pipe._shards
    assert not any(isinstance(parameter, DTensor) for parameter in pipe.parameters())


def test_wrapped_models_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    with pytest.raises(InputError, match="fully_shard has been called on the model"):
        pc.compile(fully_shard(layers(), mesh=mesh), 1, mesh=mesh)


def test_an_error_of_a_kernel_in_a_backward_names_the_line_of_the_forward() -> None:
    with pytest.raises(RunError) as caught:
        compiled(Spoilt()).step(SAMPLES)
    assert caught.value.where == f"{place(Spoilt)} (in SinBackward0)"


@pytest.mark.timeout(700)
def test_a_norm_that_is_not_finite_on_all_ranks_leaves_the_pipeline_usable(said: dict[str, list[str]]) -> None:
    """The next step said that the pipeline had failed before."""
    assert all(text.startswith("result: ['the norm of the gradients is nan', 0.72827]") for text in said["not finite"])


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("other norm", "rank 1: pipe.clip_grad_norm_(max_norm=2, norm_type=2, error_if_nonfinite=False)"),
        ("rescheduled", "rank 1: pipe.step(input 0 (8, 4) float32, target (8, 4) float32), training, after reschedule('gpipe', "),
        ("loaded on one", "rank 0: pipe.step(input 0 (8, 4) float32, target (8, 4) float32), training, after 1 load_state_dict; rank 1: "),
    ],
)  # fmt: skip
def test_what_ranks_do_otherwise_is_named_and_they_go_on(said: dict[str, list[str]], name: str, what: str) -> None:
    """Ranks scaled gradients to other norms, or waited for one another, before."""
    for text in said[name]:
        first, error, last = eval(text.splitlines()[0].removeprefix("result: "))
        assert first == last == 0.72827
        assert what in error


@pytest.mark.timeout(700)
def test_a_rank_that_could_not_load_a_state_and_goes_on_is_told(said: dict[str, list[str]]) -> None:
    """The ranks went on, one of them with its old weights."""
    for text in said["failed load"]:
        assert "training, after 1 load_state_dict; rank 1: pipe.step" in text
    assert "missing ['2.weight']" in said["failed load"][1]


@pytest.mark.timeout(700)
def test_a_thread_reads_the_state_of_its_rank_beside_steps(said: dict[str, list[str]]) -> None:
    """It was refused, as if the loss read weights of another rank."""
    assert [text.splitlines()[0] for text in said["read beside steps"]] == ["result: (1, ['no error: read'])"] * 2


@pytest.mark.timeout(700)
def test_a_step_beside_an_evaluation_in_another_thread_waits_for_its_end(said: dict[str, list[str]]) -> None:
    """One rank was told that the other had sent another value, and that one waited for ever."""
    expected = "result: (True, ['no error: 16'])"
    assert [text.splitlines()[0] for text in said["evaluated beside steps"]] == [expected] * 2


@pytest.mark.timeout(700)
def test_the_default_device_of_a_script_changes_nothing(said: dict[str, list[str]]) -> None:
    """Numbers that ranks exchange were created there: steps, norms and sums failed."""
    assert [text.splitlines()[0] for text in said["other default device"]] == ["result: []"] * 4


@pytest.mark.timeout(700)
def test_ranks_that_refuse_a_batch_together_go_on(said: dict[str, list[str]]) -> None:
    """They had to be started again, where a pipeline in one process goes on."""
    for text in said["skipped"]:
        assert text.startswith(
            "result: (['TraceError: PC108 cannot trace: the forward of Sequential raised RuntimeError: "
        )
        assert "'InputError: microbatches is an int', 'CopyDisagreement: the ranks of a pipeline are asked for" in text
        assert text.splitlines()[0].endswith("True, 4)")


@pytest.mark.timeout(700)
def test_a_rank_that_alone_cannot_record_is_named(said: dict[str, list[str]]) -> None:
    first, second = said["failed to record"]
    assert "rank 1 failed: TraceError: cannot trace: the forward of Sequential raised ValueError: bad record 7" in first
    assert second.startswith(
        "TraceError: PC108 cannot trace: the forward of Sequential raised ValueError: bad record 7"
    )


@pytest.mark.timeout(700)
def test_copies_of_stages_are_refused_by_reschedule_where_their_parameters_are_not(said: dict[str, list[str]]) -> None:
    refusal = "ScheduleError: the schedule puts stages on ranks (0, 1) and (1, 0)"
    for rank, text in enumerate(said["copies of stages"]):
        assert text.count(refusal) == 1 + rank
        assert text.splitlines()[0].endswith("True]")
    for text in said["copies of stages on one"]:
        assert "the ranks have other options of compile: schedule" in text
