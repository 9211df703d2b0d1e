"""Parameters and buffers whose values are not here for a while: what reads them raises an error, instead of going on with other numbers.

    loss_fn = lambda y, t: mse_loss(y, t) + model[0].weight.norm()        norm of a parameter that is hidden: the given error

While a parameter is hidden, its class is one of its own, with a `__torch_function__`. Shape, dtype, gradient and flags are readable
as before. The autograd engine adds gradients as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree

__all__ = ["Refusal", "addresses_of", "hidden", "hide", "is_hidden", "show"]

Refusal = Callable[[torch.Tensor], Exception]
"""Return the error for a parameter that is read while it is hidden."""

_REFUSAL = "_pipecompile_refusal"
"""Name of the attribute of a hidden parameter that has its Refusal."""

_ATTRIBUTES = (
    "device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse", "itemsize", "layout",
    "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "nelement",
    "ndimension", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride",
)  # fmt: skip


def hide(parameter: torch.Tensor, refusal: Refusal) -> None:
    """Let all that reads the values of a parameter raise an error until `show`. 2.11; `nn.Parameter` has no function of its own."""
    kind = type(parameter)
    if not issubclass(kind, _Hidden):
        vars(parameter)[_REFUSAL] = refusal
        parameter.__class__ = _hidden_class(kind)


def show(parameter: torch.Tensor) -> None:
    """Let the values of a parameter be read again. A parameter that is not hidden stays as it is."""
    kind = type(parameter)
    if issubclass(kind, _Hidden):
        parameter.__class__ = kind.__bases__[1]
        del vars(parameter)[_REFUSAL]


def is_hidden(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is hidden."""
    return issubclass(type(parameter), _Hidden)


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return where the memory of tensors begins, also of parameters that are hidden. 2.11."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(torch.Tensor.data_ptr, tensors))


@contextmanager
def hidden(parameters: Iterable[torch.Tensor], refusal: Refusal) -> Iterator[None]:
    """Hide parameters in this context."""
    own = [parameter for parameter in parameters if not is_hidden(parameter)]
    try:
        for parameter in own:
            hide(parameter, refusal)
        yield
    finally:
        for parameter in own:
            show(parameter)


class _Hidden:
    """First base of the classes of hidden parameters; the second is the class that a parameter has else."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a function gives that reads no values. Raise the error of the first hidden parameter for any other."""
        if function not in _without_values():
            leaves = pytree.tree_leaves((args, kwargs))
            one = next(leaf for leaf in leaves if is_hidden(leaf))
            raise vars(one)[_REFUSAL](one)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@cache
def _without_values() -> frozenset[Any]:
    """Return the functions, and the getters and setters of attributes, that read no values."""
    found = [(getattr(torch.Tensor, name, None), "__get__") for name in _ATTRIBUTES]
    found += [(getattr(torch.Tensor, name), "__set__") for name in ("grad", "requires_grad")]
    found.append((torch.Tensor.grad, "__delete__"))
    accessors = [getattr(attribute, accessor) for attribute, accessor in found if attribute is not None]
    return frozenset([*accessors, *(getattr(torch.Tensor, name) for name in _METHODS)])


@cache
def _hidden_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    make: Callable[..., type[nn.Parameter]] = type(kind)
    return make(kind.__name__, (_Hidden, kind), {"__module__": kind.__module__})
