from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque import trial_runs
from pipecompile.tracing.opaque.trial_calls import TrialTensor
from pipecompile.tracing.opaque.trial_runs import run_trial
from pipecompile.tracing.state import function_state, snapshot


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, table, *, scale):
        self.count += 1
        x += 1
        return x, self.layer(x) * table.weight[0] * scale, x[:, 1:], torch.rand(2)


class Whole(nn.Module):
    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.table, self.part, self.fails, self.log = nn.Embedding(3, 4), Part(), fails, []
        self.table.weight.requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.table.weight.mul_(2)
        self.log.append(x)
        made = self.part(x * 1, self.table, scale=2)
        if self.fails:
            raise ValueError("late")
        return made


def test_what_a_call_did():
    model = Whole()
    (call,) = run_trial(model, (torch.randn(3, 4),), {}, [Piece("part")])[Piece("part")]
    same, made, view, drawn = call.leaves
    assert isinstance(same, TrialTensor)
    assert (same.is_source, same.source) == (True, 0)
    assert (made.is_source, made.source, made.requires_grad, made.shape) == (False, None, True, (3, 4))
    assert (view.is_source, view.source, view.offset, view.stride) == (False, 0, 1, (4, 1))
    assert drawn.dtype == torch.float32
    assert call.written == (0,)
    assert [id(tensor) for tensor in call.used] == [id(model.table.weight)]
    assert not call.reads_foreign_tensors
    assert call.draws_random
    assert call.saved_bytes > 0
    assert sum(flops for flops, _, _ in call.work) == 2 * 3 * 4 * 4


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays(fails):
    model, x = Whole(fails=fails), torch.randn(3, 4)
    before, original, state = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    call = nn.Module.__call__
    if fails:
        with pytest.raises(ValueError, match="late"):
            run_trial(model, (x,), {}, [Piece("part")], reseed=1)
    else:
        run_trial(model, (x,), {}, [Piece("part")], reseed=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions
    assert torch.equal(x, original)
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Module.__call__ is call
    assert not model.log


def test_a_trial_run_frees_every_tensor_that_it_computed() -> None:
    """The graph held its hook, the hook the result, and the result the graph: each compile kept gigabytes."""
    model = Whole()
    run_trial(model, (torch.zeros(7, 4),), {}, [Piece("part")])
    model.log.clear()
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    assert not [one for one in alive if one.shape == (7, 4)]


def test_what_a_call_writes_through_data_is_noted():
    class Decays(nn.Linear):
        def forward(self, x, scale):
            self.weight.data.mul_(0.5)
            scale.data.add_(1)
            return super().forward(x) * scale

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Decays(2, 2)

        def forward(self, x):
            return self.part(x, x * 1)

    model = Around()
    before = model.part.weight.detach().clone()
    (call,) = run_trial(model, (torch.ones(3, 2),), {}, [Piece("part")])[Piece("part")]
    assert [*map(id, call.trained)] == [id(model.part.weight)]
    assert call.written == (1,)
    assert torch.equal(model.part.weight, before)


def test_the_state_of_the_model_is_searched_once_for_a_run(monkeypatch):
    model, searched = Whole(), []
    plain = snapshot.places_of

    def places_of(*roots, **options):
        searched.extend(root for root in roots if root is model)
        return plain(*roots, **options)

    for module in (snapshot, function_state, trial_runs):
        monkeypatch.setattr(module, "places_of", places_of)
    run_trial(model, (torch.randn(3, 4),), {}, [Piece("part")])
    assert len(searched) == 1
