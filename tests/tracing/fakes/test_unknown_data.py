from __future__ import annotations

import torch
from bodies import Body, rows

import pipecompile as pc


def made_of_numbers(m, x):
    n = x.shape[0]
    sizes = torch.tensor([n, x.shape[1]], dtype=torch.float32, device=x.device)
    nested = torch.tensor([[x.mean(), 2.0], [x.sum().long(), 4]])
    kinds = x.new_tensor([x.max(), 1]), torch.as_tensor([n / 2, 1.0]), torch.tensor([n, 2]), torch.tensor(float(n))
    assert [kind.dtype for kind in kinds] == [torch.float32, torch.float32, torch.int64, torch.float32]
    return m.a(x) * sizes.sum() + nested.sum() + sum(kind.sum() for kind in kinds)


def test_tensors_of_numbers_that_only_a_run_knows(agrees):
    graph = agrees(Body(made_of_numbers), rows(4))
    assert not graph.facts.guards


def test_their_cost_can_be_computed():
    model, (x,) = Body(made_of_numbers), rows(4)(4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=1, cost="analytic", partitioner="dp")
    assert torch.equal(pipe(x), model(x))
