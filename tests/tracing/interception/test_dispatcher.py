from __future__ import annotations

import numpy as np
import pytest
import torch
from bodies import Body, rows
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import pipecompile as pc


def per_sample(m, x):
    return vmap(lambda row: m.a(row) * 2)(x) + vmap(torch.dot, in_dims=(0, None))(x, m.mean + 1)[:, None]


def ensemble(m, x):
    weights = {"weight": torch.stack([m.a.weight, m.b.weight]), "bias": torch.stack([m.a.bias, m.b.bias])}
    return vmap(lambda w: functional_call(m.c, w, (x,)))(weights).mean(0)


def force(m, x):
    return m.b(vmap(grad(lambda row: (m.a(row) ** 2).sum()))(x))


def jacobian(m, x):
    return vmap(jacrev(lambda row: m.a(row).tanh()))(x).sum(1) + m.b(x)


def tangent(m, x):
    made, along = jvp(m.a, (x,), (torch.ones_like(x),))
    return made + m.b(along)


def cotangent(m, x):
    made, back = vjp(m.a, x)
    return made + m.b(back(torch.ones_like(made))[0])


def detached(m, x):
    return vmap(lambda row: m.a(row).detach() * m.b(row))(x)


def behind_the_back(m, x):
    return (
        m.a(x) + torch.Tensor(4).fill_(2) + torch.from_numpy(np.ones(4, "f")).add_(1) + torch.FloatTensor([1, 2, 3, 4])
    )


@pytest.mark.parametrize("body", [per_sample, ensemble, force, jacobian, tangent, cotangent, detached, behind_the_back])
def test_what_only_the_dispatcher_sees_is_recorded_and_differentiates(agrees, body):
    agrees(Body(body), rows(4), sizes=(4,) if body is tangent else (2, 3, 5))


def test_a_transformed_function_can_be_cut():
    model, (x,) = Body(force), rows(4)(6)
    pipe = pc.compile(model, 3, example_args=(x,), n_microbatches=2, cost="analytic", partitioner="dp")
    assert torch.allclose(pipe(x), model(x))
