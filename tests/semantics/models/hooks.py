"""Hooks of every kind on modules of every kind, and parametrizations."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations as P
from torch.nn.utils import parametrize

from tests.semantics.case import Case

__all__ = ["CASES"]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.two(self.one(x).relu()) * scale


class Net(nn.Module):
    """A leaf, something that is traced through, and a root."""

    def __init__(self, hook=None):
        super().__init__()
        self.leaf, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)
        self.seen = []
        if hook:
            hook(self)

    def forward(self, x):
        return self.last(self.inner(self.leaf(x), scale=2.0))


def everywhere(register):
    """`register(module, model)` for the leaf, the inner one and the root."""
    return {
        f"{place}": (
            lambda place=place: Net(lambda net: register(getattr(net, place) if place != "root" else net, net))
        )
        for place in ("leaf", "inner", "root")
    }


def changes_output(module, net):
    module.register_forward_hook(lambda _, __, output: output * 3 + 1)


def changes_input(module, net):
    module.register_forward_pre_hook(lambda _, args: (args[0].sin(), *args[1:]))


def with_keywords(module, net):
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | ({"scale": 5.0} if "scale" in kwargs else {})), with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, kwargs, output: output + args[0], with_kwargs=True, always_call=True)


def counts(module, net):
    module.register_forward_hook(lambda _, args, output: net.seen.append(1))


def collects(module, net):
    module.register_forward_hook(lambda _, args, output: net.seen.append(output.detach()))


def backward(module, net):
    module.register_full_backward_hook(lambda _, given, made: tuple(g * 2 if g is not None else None for g in given))


def backward_looks(module, net):
    module.register_full_backward_hook(lambda _, given, made: net.seen.append(made[0].sum().detach()))


def backward_pre(module, net):
    module.register_full_backward_pre_hook(lambda _, made: tuple(g * 3 for g in made))


def twice(module, net):
    def hook(_, __, output):
        return output * 2

    module.register_forward_hook(hook)
    module.register_forward_hook(hook)


KINDS = {
    "forward hook": changes_output,
    "forward pre-hook": changes_input,
    "hooks with keywords": with_keywords,
    "a hook that counts": counts,
    "a hook that collects": collects,
    "full backward hook": backward,
    "backward hook that looks": backward_looks,
    "backward pre-hook": backward_pre,
    "a hook registered twice": twice,
}


BACKWARD = ("full backward hook", "backward hook that looks", "backward pre-hook")


def _left(model):
    return sorted(float(torch.as_tensor(one).float().sum()) for one in model.seen)


def parameter_hook():
    net = Net()
    net.leaf.weight.register_hook(lambda gradient: gradient * 2)
    net.last.bias.register_hook(lambda gradient: gradient * 3)
    return net


def parametrized(apply):
    def build():
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply(net.leaf)
            apply(net.inner.two)
        return net

    return build


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x


CASES = {
    **{
        f"{kind} on {place}": Case(
            build,
            left=_left,
            refused="the whole model" * (kind in BACKWARD and place == "root"),
            merged=(kind, place) == ("a hook that collects", "root"),
        )
        for kind, register in KINDS.items()
        for place, build in everywhere(register).items()
    },
    "hooks of parameters": Case(parameter_hook),
    "weight_norm": Case(parametrized(P.weight_norm)),
    "spectral_norm": Case(parametrized(P.spectral_norm)),
    "orthogonal": Case(parametrized(P.orthogonal)),
    "a parametrization of one's own": Case(
        parametrized(lambda m: parametrize.register_parametrization(m, "weight", Symmetric()))
    ),
    "a random parametrization": Case(
        parametrized(lambda m: parametrize.register_parametrization(m, "weight", Noisy()))
    ),
    "old weight_norm": Case(parametrized(nn.utils.weight_norm)),
    "old spectral_norm": Case(parametrized(nn.utils.spectral_norm)),
}
