"""Trial runs: the real model runs on real inputs, to note the results, reads, writes and costs of calls of opaque pieces.

A trial run leaves no trace: inputs are copies; buffers, attributes, parameters that are written, gradients and the states
of random number generators are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from pipecompile.batching.containers import argument_leaves, flatten_containers
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import ObservingMode
from pipecompile.torch_private.operators import schema_of, written_tensors
from pipecompile.torch_private.storages import footprint, version_of
from pipecompile.tracing.interception.randomness import advanced_states, draws_random
from pipecompile.tracing.model_pieces import Piece, piece_calls_intercepted
from pipecompile.tracing.opaque.function_calls import function_calls_intercepted
from pipecompile.tracing.opaque.gradient_reads import GradientReads
from pipecompile.tracing.opaque.left_attributes import NOTHING_LEFT, AttributeWatch, OutsideNames
from pipecompile.tracing.opaque.named_tensors import named_by
from pipecompile.tracing.opaque.saved_bytes import SavedBytes, memory_key
from pipecompile.tracing.opaque.thinned_masks import MaskThinning
from pipecompile.tracing.opaque.trial_calls import KernelWork, TrialCall, TrialTensor
from pipecompile.tracing.outlining.outlined_calls import BlockCall
from pipecompile.tracing.reachable_code import closure_tensors
from pipecompile.tracing.state.function_state import globals_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.random_states import RandomStates
from pipecompile.tracing.state.snapshot import Place, model_restored, places_of
from pipecompile.tracing.state.tensor_contents import tensors_restored

__all__ = ["run_trial"]


def run_trial(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    pieces: Iterable[Piece],
    *,
    reseed: int = 0,
    thins: bool = False,
    n_before: int = 0,
) -> dict[Piece, list[TrialCall]]:
    """Run the model once, and return the calls of each piece in order. Raise what the model raises.

    `reseed`: draw other random numbers than trial runs with another `reseed`. `thins`: masks select fewer elements. `n_before`: calls
    of the model before, which change its state.
    """
    pieces = tuple(pieces)
    try:
        return _run(model, args, kwargs, pieces, reseed, n_before, has_hooks=True, thins=thins)
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
    return _run(model, args, kwargs, pieces, reseed, n_before, has_hooks=False, thins=thins)


_REFUSAL = "support saved tensor hooks"
"""Part of the error of `torch.func.grad` and others under hooks on what autograd saves."""


def _run(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    pieces: Iterable[Piece],
    reseed: int,
    n_before: int,
    *,
    has_hooks: bool,
    thins: bool,
) -> dict[Piece, list[TrialCall]]:
    """Run the model once. Without hooks on what autograd saves, all memory that a call allocates counts as saved."""
    calls: dict[Piece, list[_Notes]] = {piece: [] for piece in pieces}
    places = places_of(model, deep=True)
    with ExitStack() as stack:
        states = stack.enter_context(model_restored(model, places))
        masks = MaskThinning(_tensors((args, kwargs)), is_active=thins)
        kernels = _KernelMode(model, states, masks, has_hooks=has_hooks)
        for context in _contexts(model, places, calls, kernels):
            stack.enter_context(context)
        if reseed:
            torch.manual_seed(torch.initial_seed() + reseed)
            RandomStates(kernels.sources).advance(_STRIDE * reseed)
        for _ in range(n_before):
            model(*args, **kwargs)
            for made in calls.values():
                made.clear()
        model(*args, **kwargs)
    return {piece: [_with_named(piece, model, *one) for one in made] for piece, made in calls.items()}


def _contexts(
    model: nn.Module, places: Sequence[Place], calls: dict[Piece, list[_Notes]], kernels: _KernelMode
) -> tuple[AbstractContextManager[Any], ...]:
    """Return the contexts of a trial run, in which the calls of pieces are noted with the values that they get."""
    outside = OutsideNames(model)

    def handle(piece: Piece, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kernels.observer is not None:
            return run(*args, **kwargs)  # inside another piece, of whose call this is a part: it is not recorded
        owner = model.get_submodule(piece.path)
        watch = AttributeWatch(owner, outside) if piece.is_part else None
        with kernels.observing(piece, (args, kwargs)) as observer, GradientReads(model) as gradients:
            result = run(*args, **kwargs)
        gradients.check()
        observer.left = watch.left() if watch is not None else NOTHING_LEFT
        observer.result = observer.left.joined(owner, result)
        calls[piece].append(observer.notes_on(run, args, kwargs))
        return result

    return (
        torch.compiler.set_stance("force_eager"),
        tensors_restored(model, places=places),
        globals_restored(model),
        output_muted(),
        piece_calls_intercepted(model, calls, handle),
        function_calls_intercepted(model, calls, handle),
        kernels,
    )


def _with_named(piece: Piece, model: nn.Module, call: TrialCall, values: Iterable[Any], written: set[int]) -> TrialCall:
    """Return the notes on a call that also uses what its code names for other runs. It wrote the buffers with ids in `written`."""
    named = named_by(piece, model, call.block, values)
    used = {id(tensor): tensor for tensor in (*call.used, *call.trained, *(tensor for tensor, _ in named))}
    only_read = {id(tensor): tensor for tensor, is_read in named if is_read and id(tensor) not in written}
    return replace(call, used=tuple(used.values()), only_read=tuple(only_read.values()))


_Notes = tuple[TrialCall, list[Any], set[int]]
"""The notes on a call, the values that it got, and the ids of the buffers that it wrote."""

_STRIDE = 97
"""Draws between trial runs. After a single one, a loop that draws per layer would drop the same layers, shifted by one."""


# -- observation ------------------------------------------------------------------------------------------------------


def _memory_reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _KernelMode(ObservingMode):  # type: ignore[no-untyped-call]
    """Note for all memory allocated in the run which piece allocated it, and pass kernels on to the current observer."""

    def __init__(self, model: nn.Module, states: RandomStates, masks: MaskThinning, *, has_hooks: bool) -> None:
        super().__init__()
        self.model, self.sources, self.masks, self.has_hooks = model, states.sources, masks, has_hooks
        self.makers: dict[int, Piece | None] = {}
        self.memory: list[StorageWeakRef] = []
        self.observer: _CallObserver | None = None

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = _tensors((args, kwargs))
        if self.observer is not None and self.masks.decides(func, args):
            self.observer.selects = True
        args = self.masks.arguments(func, args)
        result = func(*args, **kwargs)
        self.masks.note(func, read, _tensors(result))
        known = {memory_key(tensor) for tensor in read}
        if self.observer is not None:
            self.observer.note_kernel(func, args, kwargs, read, result, counts_saved=not self.has_hooks)
        for tensor in _tensors(result):
            if memory_key(tensor) not in known and tensor.layout is torch.strided:
                self.makers[memory_key(tensor)] = self.observer.piece if self.observer else None
                self.memory.append(_memory_reference(tensor))  # so that no other memory gets this key
        return result

    @contextmanager
    def observing(self, piece: Piece, arguments: Any) -> Iterator[_CallObserver]:
        """Observe one call of `piece` inside the block."""
        self.observer = observer = _CallObserver(self, piece, arguments)
        try:
            with self._hooks(observer.saved):
                yield observer
        finally:
            self.observer = None

    def _hooks(self, saved: SavedBytes) -> AbstractContextManager[None]:
        return saved_tensors_hooks(saved.note, lambda packed: packed) if self.has_hooks else nullcontext()


class _CallObserver:
    """Notes of one call. Tensors are told apart by the key of their memory."""

    def __init__(self, kernels: _KernelMode, piece: Piece, arguments: Any) -> None:
        self.model, self.piece, self.result, self.left = kernels.model, piece, cast(Any, None), NOTHING_LEFT
        owner = kernels.model.get_submodule(piece.path)
        own = [*owner.parameters(), *owner.buffers()] if piece.is_module else []
        self.state = {memory_key(t): t for t in (*kernels.model.parameters(), *kernels.model.buffers())}
        self.given, self.arguments = arguments, argument_leaves(arguments)
        self.weights = [(tensor, version_of(tensor)) for tensor in kernels.model.parameters()]
        self.buffers = [(tensor, version_of(tensor)) for tensor in kernels.model.buffers()]
        self.versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in self.arguments]
        self.known = {memory_key(tensor) for tensor in (*own, *_tensors(self.arguments))}
        self.makers = dict(kernels.makers)
        self.outside: dict[int, torch.Tensor] = {}
        self.writes = set[int]()  # also through `weight.data`, which leaves no new version
        self.saved = SavedBytes(frozenset(self.state))
        self.work: list[KernelWork] = []
        self.draws_random = self.selects = False
        self.states = advanced_states(RandomStates(kernels.sources))

    def note_kernel(
        self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor], result: Any, *, counts_saved: bool
    ) -> None:
        """Note what a kernel reads from outside the call, what it allocates, and its FLOPs and bytes."""
        keys = {memory_key(tensor) for tensor in read}
        self.draws_random = self.draws_random or draws_random(func, args, kwargs)
        for tensor in read:
            if memory_key(tensor) not in self.known:
                self.outside[memory_key(tensor)] = tensor
        allocated = [tensor for tensor in _tensors(result) if memory_key(tensor) not in keys]
        self.known |= {memory_key(tensor) for tensor in allocated}
        self.writes |= {memory_key(tensor) for tensor in written_tensors(func, args, kwargs)}
        for tensor in allocated if counts_saved else ():
            self.saved.note(tensor)
        if allocated or schema_of(func).is_mutable:
            count_flops = flop_registry.get(getattr(func, "overloadpacket", func))
            moved_bytes = sum(map(footprint, (*read, *allocated)))
            dtype = next((tensor.dtype for tensor in (*read, *allocated)), torch.float32)
            flops = float(count_flops(*args, **kwargs, out_val=result)) if count_flops else 0.0
            self.work.append((flops, float(moved_bytes), dtype))

    def notes_on(self, run: Callable[..., Any], args: Any, kwargs: Any) -> _Notes:
        """Return the notes on the call, the values that it got, and the ids of the buffers that it wrote. Raise UnsuitableBlock."""
        written = {id(buffer) for buffer, version in self.buffers if self._is_written(buffer, version)}
        if isinstance(run, BlockCall):
            return self.block_call(run), flatten_containers((run.values, run.fixed))[0], written
        return self.trial_call(), argument_leaves((args, kwargs)), written

    def block_call(self, block: BlockCall) -> TrialCall:
        """Return the notes on the call of a block, which also uses what it may use in other runs. Raise UnsuitableBlock."""
        block.check(self.result)
        call = self.trial_call()
        used = {id(tensor): tensor for tensor in (*call.used, *block.tensors(self.model))}
        may_write = {position for position, leaf in enumerate(self.arguments) if block.may_write(leaf)}
        written = tuple(sorted({*call.written, *may_write}))
        return replace(call, used=tuple(used.values()), written=written, block=block)

    def trial_call(self) -> TrialCall:
        """Return the notes; `result` is set."""
        leaves, structure = flatten_containers(self.result)
        pairs = zip(self.arguments, self.versions, strict=True)
        written = [i for i, (one, n) in enumerate(pairs) if isinstance(one, torch.Tensor) and self._is_written(one, n)]
        used = [self.state[key] for key in self.outside if key in self.state]
        returned = [self._trial_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        present = argument_leaves(self.given)
        is_changed = [*map(id, present)] != [*map(id, self.arguments)]
        trained = tuple(weight for weight, version in self.weights if self._is_written(weight, version))
        return TrialCall(
            structure, returned, tuple(written), tuple(used), trained, self._reads_foreign_tensors(), self.work,
            sum(self.saved.sizes.values()), self.draws_random or bool(self.states.changed()), is_changed,
            left=self.left, selects=self.selects,
            buffers=tuple(one for one, version in self.buffers if self._is_written(one, version)),
        )  # fmt: skip

    def _is_written(self, tensor: torch.Tensor, version: int) -> bool:
        return version_of(tensor) != version or memory_key(tensor) in self.writes

    def _reads_foreign_tensors(self) -> bool:
        foreign = [key for key in self.outside if key not in self.state]
        if any(self.makers.get(key, self.piece) != self.piece for key in foreign):
            return True
        enclosed = (tensor for leaf in self.arguments for tensor in closure_tensors(leaf))
        return any(memory_key(tensor) not in self.state for tensor in enclosed)

    def _trial_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        argument = next((position for position, leaf in enumerate(self.arguments) if leaf is tensor), None)
        source = argument if argument is not None else self._source(memory_key(tensor))
        is_source = argument is not None or any(tensor is owned for owned in self.state.values())
        return TrialTensor(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.requires_grad,
            source, is_source,
        )  # fmt: skip

    def _source(self, key: int) -> int | torch.Tensor | None:
        for position, leaf in enumerate(self.arguments):
            if isinstance(leaf, torch.Tensor) and memory_key(leaf) == key:
                return position
        return self.state.get(key)
