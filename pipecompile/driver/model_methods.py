"""Methods of `nn.Module` that a model's author may have replaced: a pipeline calls the model's version, as a script does.

A model that freezes its backbone in `eval()`, gives an optimizer fewer parameters in `parameters()`, or keeps a layer in
float32 in `half()` does so through its pipeline too. Other methods are torch's, applied to the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from pipecompile.torch_private.storages import storage_key

__all__ = ["ModelMethods", "overrides"]

Method = TypeVar("Method", bound=Callable[..., Any])


def overrides(model: nn.Module, name: str) -> bool:
    """Return whether a model has a version of its own of a method of `nn.Module`, in its class or set on the object."""
    return name in vars(model) or getattr(type(model), name, None) is not getattr(nn.Module, name)


def _asked(of_torch: Method) -> Method:
    """Return a method that asks the model's version, if it has one, and else torch's."""
    name = of_torch.__name__

    @wraps(of_torch)
    def ask(self: ModelMethods, *args: Any, **kwargs: Any) -> Any:
        if overrides(self.model, name):
            return getattr(self.model, name)(*args, **kwargs)
        return of_torch(self, *args, **kwargs)

    return cast(Method, ask)


def _told(of_torch: Method, *, replaces_tensors: bool = False) -> Method:
    """Return a method that has the model's version change it, if it has one, and else torch's. The result is the pipeline."""
    name = of_torch.__name__

    @wraps(of_torch)
    def tell(self: ModelMethods, *args: Any, **kwargs: Any) -> Any:
        if not overrides(self.model, name):
            return of_torch(self, *args, **kwargs)
        method = getattr(self.model, name)
        result = self._replaced_by(method, args, kwargs) if replaces_tensors else method(*args, **kwargs)
        return self if result is self.model else result

    return cast(Method, tell)


class ModelMethods(nn.Module):
    """Calls the model's own version of what `nn.Module` does with parameters, buffers, layers, modes and dtypes."""

    model: nn.Module

    parameters = _asked(nn.Module.parameters)
    named_parameters = _asked(nn.Module.named_parameters)
    buffers = _asked(nn.Module.buffers)
    named_buffers = _asked(nn.Module.named_buffers)
    children = _asked(nn.Module.children)
    modules = _asked(nn.Module.modules)
    get_parameter = _asked(nn.Module.get_parameter)
    get_buffer = _asked(nn.Module.get_buffer)
    get_submodule = _asked(nn.Module.get_submodule)
    get_extra_state = _asked(nn.Module.get_extra_state)
    set_extra_state = _asked(nn.Module.set_extra_state)

    zero_grad = _told(nn.Module.zero_grad)
    requires_grad_ = _told(nn.Module.requires_grad_)
    eval = _told(nn.Module.eval)
    half = _told(nn.Module.half, replaces_tensors=True)
    float = _told(nn.Module.float, replaces_tensors=True)
    double = _told(nn.Module.double, replaces_tensors=True)
    bfloat16 = _told(nn.Module.bfloat16, replaces_tensors=True)
    type = _told(nn.Module.type, replaces_tensors=True)
    to = _told(nn.Module.to, replaces_tensors=True)
    to_empty = _told(nn.Module.to_empty, replaces_tensors=True)
    cuda = _told(nn.Module.cuda, replaces_tensors=True)
    cpu = _told(nn.Module.cpu, replaces_tensors=True)
    share_memory = _told(nn.Module.share_memory, replaces_tensors=True)

    def _forget(self) -> None:
        """Drop what depends on the model's tensors, after they were replaced or changed their dtype."""

    def _check_replaceable(self) -> None:
        """Raise InputError if the tensors of the model cannot be replaced or change their dtype any more."""

    def _refuse(self) -> None:
        """Raise InputError for a move of the model to another device."""

    def _replaced_by(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the model that may replace its tensors, and return its result."""
        self._check_replaceable()
        before = _tensors_seen(self.model)
        result = method(*args, **kwargs)
        after = _tensors_seen(self.model)
        if after != before:
            self._forget()
        if any(new.device != old.device for old, new in zip(before, after, strict=False)):
            self._refuse()
        return result


class _Seen(NamedTuple):
    """Facts by which a replaced tensor is noticed."""

    object: int
    dtype: torch.dtype
    device: torch.device
    memory: int


def _tensors_seen(model: nn.Module) -> list[_Seen]:
    tensors = chain(nn.Module.parameters(model), nn.Module.buffers(model))
    return [
        _Seen(id(one), one.dtype, one.device, storage_key(one) if one.layout is torch.strided else 0) for one in tensors
    ]
