"""`torch.tensor([h, w, loss])`: numbers that are not known while recording, put into a new tensor.

Torch would want each number at once. What comes out has a shape and dtype that do not depend on them, and the graph
makes the call with the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensorMode, unset_fake_temporarily

__all__ = ["with_unknown_data"]

_PLACE = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Where the data stand."""


def with_unknown_data(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """`func`, or when it makes a tensor of unknown numbers, what makes one of the same kind."""
    place = _PLACE.get(func)
    if place is None:
        return func  # type: ignore[no-any-return]
    data = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, torch.Tensor) or not any(_is_unknown(leaf) for leaf in pytree.tree_leaves(data)):
        return func  # type: ignore[no-any-return]

    def make(*_args: Any, **_kwargs: Any) -> Any:
        with unset_fake_temporarily() as fake:
            options = {key: value for key, value in kwargs.items() if key not in ("data", "obj", "copy")}
            if func is torch.Tensor.new_tensor:
                options = {"dtype": args[0].dtype, "device": args[0].device} | options
            made = torch.tensor(pytree.tree_map(_known, data), **options)
        return made if not isinstance(fake, FakeTensorMode) else fake.from_tensor(made, static_shapes=True)

    return make


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool))


def _known(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.zeros((), dtype=leaf.dtype)
    return leaf.node.pytype(0) if _is_unknown(leaf) else leaf
