"""Initial values of a model that was built on `meta`, by the sources in `compile(init=...)`.

    "reset_parameters"      each module's own method, then `_init_weights(module)` of the nearest enclosing model
    a function of a module  called with every module, children first, as `module.apply` does
    a path                  a checkpoint, of which only the tensors on this rank are read

Several sources run one after the other. Only tensors that were on `meta` get values; all others keep theirs. Random numbers
of each module come from a seed of its own, so the values depend neither on the cut nor on the number of ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipecompile.errors import InputError, described
from pipecompile.parameters.checkpoint_files import check_readable, read_checkpoint
from pipecompile.parameters.uninitialized import UninitializedTensors, temporary_memory, tensor_names
from pipecompile.text.input_checks import file_path
from pipecompile.text.shown_value import shown, type_text
from pipecompile.torch_private.accelerators import forked_generators, initialized_devices
from pipecompile.torch_private.modules import buffers_of, parameters_of
from pipecompile.tracing.state.preserved_run import preserved

__all__ = ["Init", "MetaInit", "Source", "sources_of"]

RESET = "reset_parameters"
_SHOWN = 8
"""Names of tensors that an error message lists; it counts the rest."""

Source = Path | Callable[[nn.Module], object] | str
"""A checkpoint, a function of a module, or "reset_parameters"."""

Init = Source | Sequence[Source] | None
"""The type of `compile(init=...)`."""


def sources_of(init: Init, model: nn.Module) -> tuple[Source, ...]:
    """Return the sources in `init`, flat and in order.

    Raises InputError for a value that is not a source, a checkpoint that does not exist, and a model without tensors on meta.
    """
    try:
        sources = _sources_of(init)
    except RecursionError:
        raise InputError(f"init={shown(init)} holds itself, or is nested too deeply") from None
    if sources and not is_on_meta(model):
        raise InputError(
            "init= has no effect: no tensor of the model is on meta",
            why="init= only writes tensors on meta",
            hint='build the model under `with torch.device("meta")`, or call load_state_dict without init=',
        )
    return sources


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of `model` is on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _sources_of(init: Init) -> tuple[Source, ...]:
    if init is None:
        return ()
    if isinstance(init, (list, tuple)):
        return tuple(source for each in init for source in _sources_of(each))
    if callable(init) or (isinstance(init, str) and init == RESET):
        return (init,)
    if not isinstance(init, (str, os.PathLike)):
        raise InputError(
            f"init is {type_text(init)}",
            hint=f'"{RESET}", a function of a module, the path of a checkpoint, or a list of them',
        )
    path = file_path("init", init)
    check_readable(path)
    return (path,)


class MetaInit:
    """Initialisation of the tensors of a model that were on `meta`; without effect for any other model.

    `device` is the device to trace the model for, because some ranks have given memory to parameters that are still on meta on
    others; None if no tensor was on meta. `gather(topic, text)` returns the texts of all processes; by default there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        uninitialized: UninitializedTensors,
        sources: Sequence[Source],
        device: torch.device,
    ) -> None:
        self.model, self.uninitialized, self.sources = model, uninitialized, sources
        self.is_needed = is_on_meta(model)
        self.is_done = not self.is_needed
        self.device = device if self.is_needed else None
        self.seed: int | None = None
        self.gather: Callable[[str, str], list[str]] = lambda _, text: [text]

    def fill(self) -> None:
        """Write the values of the uninitialized tensors from the sources, if there are any; to be called after placement.

        Raises InputError if a tensor stays without values. All processes use the seed of the first.
        """
        if not self.is_needed:
            return
        self.is_done = False
        if self.sources:
            seed = str(torch.randint(2**62, ()).item()) if self.seed is None else str(self.seed)
            self.seed = int(self.gather("seed of the weights", seed)[0])
            _fill(self.model, self.uninitialized, self.sources, self.seed)
            self.check()

    def check(self) -> bool:
        """Raise InputError, on all ranks, listing the tensors that were on meta and have no values.

        Return True at the first call after the last tensor was initialised, else False.
        """
        if self.is_done:
            return False
        local = "\n".join(tensor_names(self.model, self.uninitialized.remaining()))
        missing = [name for text in self.gather("values of the model", local) for name in text.splitlines()]
        if missing:
            raise _without_values(list(dict.fromkeys(missing)), with_sources=bool(self.sources))
        self.is_done = True
        return True


def _without_values(names: Sequence[str], *, with_sources: bool) -> InputError:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    computed = any("(" in name for name in names)
    return InputError(
        f"{len(names)} tensors of the model have no values"
        if len(names) > 1
        else "1 tensor of the model has no values",
        where=", ".join(names[:_SHOWN]) + more,
        why="the model was built on meta"
        + (", and values computed by its constructor have to be computed again" if computed else "")
        + (", and no source in init= fills them" if with_sources else ""),
        hint=f'init=["{RESET}", checkpoint, fill], where `def fill(module)` computes the missing values'
        if with_sources
        else f'init="{RESET}", a checkpoint, or a function of a module; or pipe.load_state_dict(...) before the first step',
    )


def _fill(model: nn.Module, uninitialized: UninitializedTensors, sources: Sequence[Source], seed: int) -> None:
    targets = {id(tensor): tensor for tensor in uninitialized.remaining()}
    for source in sources if targets else ():
        if isinstance(source, Path):
            read_checkpoint(source, _state_dict_names(model, targets))
        else:
            initialise = _reset(model) if isinstance(source, str) else partial(_by_function, source)
            _initialise_modules(model, uninitialized, initialise, seed)


def _state_dict_names(model: nn.Module, targets: dict[int, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Return (names, tensor) of the tensors in `targets` (by id) that `state_dict` has. A tied tensor has several names."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in targets:
            names.setdefault(id(value), []).append(name)
    return [(aliases, targets[key]) for key, aliases in names.items()]


# -- sources that are called with modules -----------------------------------------------------------------------------


Initialise = Callable[[str, nn.Module], object]


def _initialise_modules(
    model: nn.Module, uninitialized: UninitializedTensors, initialise: Initialise, seed: int
) -> None:
    """Call `initialise(name, module)` for every module that has an uninitialized tensor, its children first.

    Tensors of the module that live on another rank get temporary memory, so the random numbers that the module draws for its
    other tensors do not depend on the placement.
    """
    for name, module in _children_first(model):
        tensors = [*module.parameters(), *module.buffers(), *_attributes(module)]
        if not any(tensor in uninitialized for tensor in tensors):
            continue
        initialised = [tensor for tensor in tensors if uninitialized.has_values(tensor)]
        direct = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        with (
            torch.no_grad(), preserved(initialised), temporary_memory(direct), _in_place(module), _seeded(seed, name),
        ):  # fmt: skip
            try:
                initialise(name, module)
            except Exception as error:
                raise InputError(
                    "a module of the model cannot be given values",
                    where=f"{name or 'the model'}, {type_text(module)}",
                    why=described(error),
                    hint="init= a function that initialises this module and does nothing for others",
                ) from error


def _by_function(function: Callable[[nn.Module], object], _: str, module: nn.Module) -> None:
    function(module)


def _children_first(module: nn.Module, name: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, Any]]:
    seen = set() if seen is None else seen
    if module not in seen:
        seen.add(module)
        for child, part in module.named_children():
            yield from _children_first(part, f"{name}.{child}".strip("."), seen)
        yield name, module


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    return [value for value in vars(module).values() if isinstance(value, torch.Tensor)]


@contextmanager
def _in_place(module: nn.Module) -> Iterator[None]:
    """Copy a tensor that a method creates anew into the tensor that it replaces, which the stages refer to."""
    tables: list[dict[str, Any]] = [
        table for part in module.modules() for table in (parameters_of(part), buffers_of(part), vars(part))
    ]
    entries = [
        (table, name, value) for table in tables for name, value in table.items() if isinstance(value, torch.Tensor)
    ]
    yield
    for table, name, value in entries:
        new = table.get(name)
        if new is not value and isinstance(new, torch.Tensor) and new.shape == value.shape:
            if not value.is_meta and not new.is_meta:
                value.copy_(new)
            table[name] = value


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the random number generators for the module `name`; restore their states afterwards."""
    with forked_generators(initialized_devices()):
        torch.manual_seed(int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
        yield


def _reset(model: nn.Module) -> Initialise:
    """Return a function that calls the module's own `reset_parameters`, then `_init_weights(module)` of the nearest enclosing
    module that has such a method, as models of transformers do.
    """
    modules = dict(model.named_modules())

    def initialise(name: str, module: nn.Module) -> None:
        own = getattr(module, RESET, None) or getattr(module, f"_{RESET}", None)
        if callable(own):
            own()
        parts = name.split(".") if name else []
        enclosing = (modules[".".join(parts[:count])] for count in range(len(parts), -1, -1))
        methods = (getattr(module, "_init_weights", None) for module in enclosing)
        init_weights = next((method for method in methods if _accepts_one_argument(method)), None)
        if init_weights is not None:
            init_weights(module)

    return initialise


def _accepts_one_argument(method: object) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True
