"""Calls of opaque pieces are counted, and matched with the trial runs in order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile import TraceError
from pipecompile.batching.call_inputs import flatten
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import OpaquePieces, OpaqueReason
from pipecompile.tracing.opaque.opaque_calls import OpaqueCall, OpaqueCalls
from pipecompile.tracing.opaque.result_spec import infer_result_specs
from pipecompile.tracing.opaque.trial_runs import run_trial

PART = Piece("part")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x)[:, :1].expand(-1, 4))


def recorded_calls() -> tuple[Twice, OpaqueCalls]:
    model, x = Twice(), torch.randn(4, 4)
    opaque = OpaquePieces(model, flatten(model.forward, (x,), {}, None))
    opaque.reasons = {PART: OpaqueReason(PART, TraceError(code="PC101"))}
    runs = [run_trial(model, (part,), {}, [PART])[PART] for part in (x, x[:3])]
    opaque.result_specs = {PART: infer_result_specs(PART, runs, [4, 3])}
    return model, OpaqueCalls(opaque, BatchSymbol(4))


def call(calls: OpaqueCalls) -> OpaqueCall:
    with FakeTensorMode(shape_env=calls.symbol.env, allow_non_fake_inputs=True) as mode:
        argument = torch.empty(calls.symbol.size, 4)
        return calls.call(PART, lambda x: x, ((argument,), {}), lambda tensor: mode.from_tensor(tensor))


def test_calls_are_numbered_and_no_more_than_in_the_trial_runs() -> None:
    model, calls = recorded_calls()
    first, second = call(calls), call(calls)
    assert (first.number, second.number) == (0, 1)
    assert first.module is second.module is calls.modules[PART, 0]
    assert (first.target, first.result.shape[1]) == ("part", 4)
    assert [id(tensor) for tensor in first.written] == [id(model.part.count)]
    assert {id(tensor) for tensor in first.held} == {
        id(tensor) for tensor in (*model.part.parameters(), model.part.count)
    }
    assert first.spelling(("x",)) == ("call_module", "part", (0, 0, "x"))
    with pytest.raises(TraceError, match="part is called more often while the model is recorded"):
        call(calls)


def test_a_second_call_of_the_model_counts_anew_and_is_forgotten() -> None:
    _, calls = recorded_calls()
    call(calls)
    with calls.counts_restored():
        assert [call(calls).number for _ in range(2)] == [0, 1]
    assert len(calls.modules[PART, 0].expected_results) == 1
    assert call(calls).number == 1
    assert [reason.piece for reason in calls.reasons()] == [PART]


def test_functions_are_found_by_the_module_that_calls_them() -> None:
    _, calls = recorded_calls()
    function = Piece("part", "__getitem__", "model.py:3 in forward")
    calls.opaque.reasons[function] = OpaqueReason(function, TraceError(code="PC103"))
    assert calls.function_names == {("part", "__getitem__")}


class Counts(nn.Module):
    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if x.mean() > 1:
            counts += 1
        return x


class ReadsCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.counting = nn.Linear(4, 4), nn.Linear(4, 4), Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, numbers = torch.tensor(0), torch.tensor([0, 0])
        h = self.a(self.counting(self.counting(x, number), numbers[:1])).tanh()
        if number > 0:
            h = h * 2
        if numbers.sum() > 0:
            h = h + 3
        return self.b(h)


def test_python_does_not_know_numbers_that_a_piece_may_write() -> None:
    model, x = ReadsCounts(), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=1, cost="analytic", check=False)
    for mean in (0, 2):
        x = torch.randn(4, 4) + 3 * mean
        assert torch.equal(pipe(x), model(x))
