"""`torch.tensor([h, w, loss])`: tensors made of numbers that are not known while recording.

Torch would read each number at once. The result's shape and dtype do not depend on the numbers, so zeros stand for them;
the graph makes the call with the real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensorMode, unset_fake_temporarily

__all__ = ["with_unknown_data"]

_DATA_POSITION = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Per function that makes a tensor of numbers, the position of the numbers among its arguments."""


def with_unknown_data(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return `func`, or, if the call makes a tensor of unknown numbers, a function that makes one of zeros."""
    position = _DATA_POSITION.get(func)
    if position is None:
        return func  # type: ignore[no-any-return]
    data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, torch.Tensor) or not any(_is_unknown(leaf) for leaf in pytree.tree_leaves(data)):
        return func  # type: ignore[no-any-return]

    def make(*_args: Any, **_kwargs: Any) -> Any:
        with unset_fake_temporarily() as fake:
            options = {key: value for key, value in kwargs.items() if key not in ("data", "obj", "copy")}
            if func is torch.Tensor.new_tensor:
                options = {"dtype": args[0].dtype, "device": args[0].device} | options
            zeros = torch.tensor(pytree.tree_map(_zero, data), **options)
        return zeros if not isinstance(fake, FakeTensorMode) else fake.from_tensor(zeros, static_shapes=True)

    return make


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool))


def _zero(leaf: Any) -> Any:
    """Return a zero of the same type for an unknown number, and a known number as it is."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros((), dtype=leaf.dtype)
    return leaf.node.pytype(0) if _is_unknown(leaf) else leaf
