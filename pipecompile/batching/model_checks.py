"""Check of the model that is passed to `compile`, `trace` and `explain`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipecompile.errors import InputError
from pipecompile.text.shown_value import type_text

__all__ = ["validate_model"]

_SHAPELESS = (UninitializedParameter, UninitializedBuffer)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _as_module(value: object) -> str:
    """Return the hint for a value that is passed instead of a model."""
    if isinstance(value, type):
        return f"an instance of the class: compile({value.__name__}(...), ...)"
    if isinstance(value, Mapping):
        return "the model itself, after model.load_state_dict(...)"
    if isinstance(value, str):
        return f"a module, not its name; on the command line: pipecompile check torchvision:{value or 'resnet18'} --input 8x3x64x64"
    if isinstance(value, Sequence):
        return "compile(nn.Sequential(*layers), ...)"
    if isinstance(value, ExportedProgram):
        return "the model that was exported: it is recorded anew, for every batch size"
    if not callable(value):
        return "an instance of a subclass of nn.Module"
    return "wrap the function in an nn.Module with this forward"


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def validate_model(model: object) -> nn.Module:
    """Return the model. Raise InputError if it is not an `nn.Module`, is wrapped or compiled already, or has lazy layers without shapes.

    InputError, too, if its forward is a coroutine or a generator.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is {_with_article(type(model).__name__)}, not an nn.Module",
            hint=_as_module(model),
        )
    if isinstance(model, _WRAPPERS):
        raise InputError(f"the model is wrapped in {type(model).__name__}", why="the wrapper copies the whole model to every device",
                         hint='the model inside: compile(model.module, ...); mesh= with a dimension "dp" copies a pipeline')  # fmt: skip
    if hasattr(type(model), "reschedule"):
        raise InputError(f"the model is {type_text(model)} already", why="a pipeline is compiled once",
                         hint="compile(pipe.model, ...); or pipe.reschedule(...) for another schedule")  # fmt: skip
    if isinstance(model, nn.ModuleList):
        raise InputError("the model is a ModuleList, which has no forward", hint="compile(nn.Sequential(*layers), ...)")
    _validate_forward(model)
    _validate_scripts(model)
    if lazy := [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if isinstance(tensor, _SHAPELESS)
    ]:
        raise InputError("the model has parameters without a shape", where=", ".join(lazy),
                         why="lazy layers get their shapes in the first call",
                         hint="call model(*example_args) once before compile")  # fmt: skip
    return model


def _validate_scripts(model: nn.Module) -> None:
    """Raise InputError for a scripted module whose forward sets attributes: they are in TorchScript, where a recording cannot
    restore them.
    """
    scripts = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    for name, module in scripts:
        graph: Any = module.inlined_graph if hasattr(module, "forward") else None
        if graph is not None and (found := graph.findAllNodes("prim::SetAttr")):
            raise InputError(f"the forward of the scripted module {name or type(model).__name__!r} sets the attribute {found[0].s('name')!r}",
                             why="a recording runs it, and cannot see or restore what is in TorchScript",
                             hint="a buffer that is written in place, self.h.copy_(...); or the module without torch.jit.script")  # fmt: skip


def _validate_forward(model: nn.Module) -> None:
    """Raise InputError for a forward whose call runs nothing yet: `async def`, or one with `yield`."""
    forward = model.forward
    if inspect.iscoroutinefunction(forward) or inspect.isasyncgenfunction(forward):
        what, hint = "is `async def`", "def forward; what has to be awaited belongs before the call"
    elif inspect.isgeneratorfunction(forward):
        what, hint = "is a generator", "a forward that returns a list or tuple of what it yields"
    else:
        return
    code = getattr(forward, "__code__", None)
    raise InputError(f"the forward of {type(model).__name__} {what}", where=f"{code.co_filename}:{code.co_firstlineno}" if code else "",
                     why="its call computes nothing yet", hint=hint)  # fmt: skip
