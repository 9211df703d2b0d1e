"""The autograd engine: backward passes that add to `.grad`, the memory of gradients, nodes of the graph, and tensors that nodes saved."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter, methodcaller
from sys import getrefcount
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils.hooks import RemovableHandle

from pipecompile.torch_private.accelerators import accelerator_type

__all__ = [
    "FunctionNode",
    "accumulate",
    "gradient_hook_tables",
    "has_joint_hook",
    "hook_uncounted",
    "hooks_of_tensor",
    "hooks_registered",
    "input_metadata",
    "is_accumulation_held",
    "is_accumulation_watched",
    "is_joint_hook",
    "node_name",
    "other_users",
    "raw_saved_names",
    "saved_tensor_hooks",
    "saved_tensor_hooks_allowed",
    "sequence_number",
    "unhooked",
    "unpacked_name",
    "will_accumulate",
    "will_run",
]


def accumulate(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> None:
    """Run the backward from `roots` and add to `.grad` of all leaves, or of `weights` alone. 2.11.

    `torch.autograd.backward` checks shapes and dtypes before, and the engine checks them again. On a small cell these checks
    cost as much as the backward itself (benchmarks/overhead.py).
    """
    is_plain = not _has_accelerators() and not _LOG.isEnabledFor(logging.DEBUG)
    run: Callable[..., object] = _run_here if is_plain else _engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, tuple(weights), allow_unreachable=True, accumulate_grad=True)


_LOG = logging.getLogger("torch.autograd.graph")

_run_here = Variable._execution_engine.run_backward
"""The engine's own function: without the context variables for threads of other devices, and without logging. 2.11."""


@cache
def _has_accelerators() -> bool:
    """Return whether a backward may have nodes in threads of other devices, also one that begins on the CPU."""
    return accelerator_type() is not None


FunctionNode = torch._C._FunctionBase
"""Base class of nodes of `torch.autograd.Function`; a GradientEdge to such a node keeps more alive. 2.11."""

hooks_of_tensor: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""Return the hooks of `tensor.register_hook`, None before the first one. 2.11."""


def hook_uncounted(leaf: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Put the first hook on a leaf, without a handle: `hooks_registered` of another thread does not count it. 2.11."""
    leaf._backward_hooks = OrderedDict({-1: hook})


saved_tensor_hooks: Callable[[], object] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Return the innermost `torch.autograd.graph.saved_tensors_hooks` that is active, or None. 2.11."""


@contextmanager
def saved_tensor_hooks_allowed() -> Iterator[None]:
    """Undo `torch.autograd.graph.disable_saved_tensors_hooks` until the block ends. 2.11."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        yield
        return
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_disable(message)


def unhooked() -> AbstractContextManager[object]:
    """Return a context in which the user's hooks on saved tensors, as those of a checkpoint around, are not called."""
    if saved_tensor_hooks() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


hooks_registered: Callable[[], int] = partial(getattr, RemovableHandle, "next_id")
"""Return a count that grows with each hook registered on a tensor, node or module. 2.11; bound, because each F reads it twice."""


input_metadata: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""Return shape, dtype and device of the gradients that a node receives. 2.11."""


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Return the number of a node, which grows with each node that a thread makes. 2.11."""


def gradient_hook_tables(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Return the tables of hooks that run when a tensor gets its gradient, and when that is accumulated. 2.11."""
    return [table for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if table]


def is_accumulation_held(leaf: torch.Tensor) -> bool:
    """Return whether something keeps the node that adds to `.grad` of a leaf: a graph, or who registered a hook on it. 2.11.

    Autograd makes the node anew when nothing does. Then what is noted on it is lost.
    """
    _accumulation(leaf).metadata[is_accumulation_held] = True
    return is_accumulation_held in _accumulation(leaf).metadata


def is_accumulation_watched(leaf: torch.Tensor) -> bool:
    """Return whether the node that adds to `.grad` of a leaf has hooks of Python. 2.11.

    Only a node that something has is asked: a graph that is kept, or who registered a hook on it. Unlike `is_accumulation_held` this
    makes no dict on the others.
    """
    node = _accumulation(leaf)
    return getrefcount(node) > _OWN_REFERENCES and _has_hooks(node)


def _has_hooks(node: Any) -> bool:
    """Return whether hooks are registered on a node: in the table that another hook gets. 2.11."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        table = handle.hooks_dict_ref()
        handle.remove()
        if table:
            return True
    return False


_OWN_REFERENCES = 2


def is_joint_hook(hook: object) -> bool:
    """Return whether a hook is one of `torch.autograd.graph.register_multi_grad_hook`, which has its functions in that file. 2.11."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


def _accumulation(leaf: torch.Tensor) -> Any:
    with torch.inference_mode(mode=False), torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the backward that runs now will run a node, too. 2.11."""


def will_accumulate(node: Any) -> bool:
    """Return whether the backward that runs now adds to `.grad` of a leaf, given the node that would. Not in `torch.autograd.grad`. 2.11."""
    try:
        return will_run(node)
    except RuntimeError:  # a leaf whose gradient is returned
        return False


def raw_saved_names(node: Any) -> list[str]:
    """Return the attributes of a node that hold what it saved, packed: `_raw_saved_self`, `_raw_saved_tensors`, ... 2.11."""
    return [name for name in dir(node) if name.startswith("_raw_saved")]


def unpacked_name(name: str) -> str:
    """Return the attribute that unpacks what `name` of `raw_saved_names` holds: `_saved_self`, `saved_tensors`, ... 2.11."""
    return "saved_tensors" if name == "_raw_saved_tensors" else name.replace("_raw", "", 1)


_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_ALONE = 2
"""Uses of a storage that one tensor has: by the tensor, and by the Python object through which they are counted."""


def other_users(tensor: torch.Tensor) -> int:
    """Return how many other tensors live in the memory of a strided tensor, such as another gradient. 2.11."""
    return _use_count(tensor.untyped_storage()._cdata) - _ALONE


def node_name(node: Any) -> str:
    """Return the name of a node of autograd. The node of a `torch.autograd.Function` is its `ctx`, on which users set a `name`. 2.11."""
    return str(type(node).name(node))


def has_joint_hook(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a hook of `register_multi_grad_hook`. 2.11."""
    return any(is_joint_hook(hook) for table in gradient_hook_tables(tensor) for hook in table.values())
