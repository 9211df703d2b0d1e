"""The objects that a compilation passes from phase to phase, for tests of one phase: options, mini-batches, specializations."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatches import MiniBatch, sizes
from pipecompile.driver.backend import Backend
from pipecompile.driver.compile_context import CompileContext, CompileRequest, Decision
from pipecompile.driver.phases import specialize
from pipecompile.driver.signature import signature_of
from pipecompile.driver.specialization import Specialization
from pipecompile.options import Options

__all__ = ["context_of", "layers", "mini_batch", "options_of", "request_of", "specialized"]

_USUAL = {name: each.default for name, each in inspect.signature(pc.compile).parameters.items()}
_NOT_IN_OPTIONS = ("model", "n_stages", "example_args", "example_kwargs", "mesh")


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def options_of(model: nn.Module | None = None, n_stages: int = 2, **keywords: Any) -> Options:
    """Return the options of `compile` with these keywords, for CPU stages and analytic costs."""
    keywords = {"devices": ["cpu"] * n_stages, "cost": "analytic", "loss_fn": torch.Tensor.mean} | keywords
    usual = {name: value for name, value in _USUAL.items() if name not in _NOT_IN_OPTIONS}
    return Options.of(layers() if model is None else model, n_stages, **(usual | keywords))


def mini_batch(model: nn.Module, count: int, *args: Any, **kwargs: Any) -> MiniBatch:
    """Return the inputs of a call in `count` micro-batches."""
    inputs = flatten(model.forward, args, kwargs)
    return MiniBatch(inputs, sizes(inputs.samples, count) if inputs.samples else (1,))


def request_of(model: nn.Module, *batches: MiniBatch) -> CompileRequest:
    """Return the request to compile for the first of these splits, and to compare all of them."""
    return CompileRequest(batches[0], batches, signature_of(model, batches[0]))


def context_of(model: nn.Module, options: Options, backend: Backend | None = None) -> CompileContext:
    return CompileContext.of(model, options, backend or Backend())


def specialized(model: nn.Module | None = None, samples: int = 4, **keywords: Any) -> Specialization:
    """Return the specialization of a model for 2 micro-batches of random inputs (samples, 4)."""
    model = layers() if model is None else model
    options = options_of(model, **keywords)
    request = request_of(model, mini_batch(model, 2, torch.randn(samples, 4)))
    return specialize(request, options, Decision(), context_of(model, options))[0]
