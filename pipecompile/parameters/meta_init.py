"""What goes into the tensors of a model that was built on `meta`, as `compile(init=...)` says.

    "reset_parameters"      each module's own, and the model's `_init_weights(module)`
    a function of a module  called with every module, children first, as `module.apply` does
    a path                  of a checkpoint, of which only the tensors that are here are read

Several are done one after the other. Only what was on `meta` gets values: what had any keeps them. Random numbers are drawn for
each module from a seed of its own, so they are the same however the model is cut, and on however many ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.parameters.checkpoint_files import check_readable, read_checkpoint
from pipecompile.parameters.uninitialized import Blanks, names_of, with_memory
from pipecompile.tracing.state.preserved_run import preserved

if TYPE_CHECKING:
    from pipecompile.options import Options

__all__ = ["Filling", "Init", "Source", "sources_of"]

RESET = "reset_parameters"
_SHOWN = 8

Source = Path | Callable[[nn.Module], object] | str
"""A checkpoint, a function of a module, or "reset_parameters"."""

Init = Source | Sequence[Source] | None
"""What `compile` takes."""


def sources_of(init: Init, model: nn.Module) -> tuple[Source, ...]:
    """One after the other. Raises InputError for what is none, for a checkpoint that is not there, and for a model that has
    all its values.
    """
    sources = _sources_of(init)
    if sources and not is_on_meta(model):
        raise InputError(
            "init= is given, and the model has its values already",
            why="it is for what is on meta, and would change nothing",
            hint='build the model under torch.device("meta"), or load_state_dict',
        )
    return sources


def is_on_meta(model: nn.Module) -> bool:
    """Is any of it?"""
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
            f"init is a {type(init).__name__}",
            hint=f'"{RESET}", a function of a module, the path of a checkpoint, or a list of them',
        )
    check_readable(Path(init))
    return (Path(init),)


class Filling:
    """What became of the values of a model. One that was never on `meta` has them.

    `device` is where to record it: some ranks have given memory to parameters that others have still on `meta`. `gathered` tells
    all processes what each says to a topic; here there is one.
    """

    def __init__(self, model: nn.Module, blanks: Blanks, options: Options) -> None:
        self.model, self.blanks, self.sources = model, blanks, options.init
        self.is_needed = is_on_meta(model)
        self.is_done = not self.is_needed
        self.device = options.devices[0] if self.is_needed else None
        self.seed: int | None = None
        self.gathered: Callable[[str, str], list[str]] = lambda _, text: [text]

    def fill(self) -> None:
        """Give what is blank its values, when a build has been placed. Raises InputError when something stays without."""
        if not self.is_needed:
            return
        self.is_done = False
        if self.sources:
            drawn = str(torch.randint(2**62, ()).item()) if self.seed is None else str(self.seed)
            self.seed = int(self.gathered("seed of the weights", drawn)[0])
            _fill(self.model, self.blanks, self.sources, self.seed)
            self.check()

    def check(self) -> bool:
        """Has the last value come since this was asked for? Raises InputError that lists what has none, on all ranks."""
        if self.is_done:
            return False
        left = "\n".join(names_of(self.model, self.blanks.left()))
        missing = [name for text in self.gathered("values of the model", left) for name in text.splitlines()]
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
        else "a tensor of the model has no values",
        where=", ".join(names[:_SHOWN]) + more,
        why="the model was built on meta"
        + (", what its constructor computes has to be computed again" if computed else "")
        + (", and nothing in init= fills them" if with_sources else ""),
        hint=f'init=["{RESET}", checkpoint, fill], where `def fill(module)` computes what the others do not have'
        if with_sources
        else f'init="{RESET}", a checkpoint, or a function of a module; or pipe.load_state_dict(...) before the first step',
    )


def _fill(model: nn.Module, blanks: Blanks, sources: Sequence[Source], seed: int) -> None:
    blank = {id(tensor): tensor for tensor in blanks.left()}
    for source in sources if blank else ():
        if isinstance(source, Path):
            read_checkpoint(source, _named(model, blank))
        else:
            _call(model, blanks, _reset(model) if isinstance(source, str) else partial(_by_function, source), seed)


def _named(model: nn.Module, blank: dict[int, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """The blank tensors that `state_dict` has, each with all its names there."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in blank:
            names.setdefault(id(value), []).append(name)
    return [(found, blank[key]) for key, found in names.items()]


# -- by the modules -------------------------------------------------------------------------------------------------


Initialise = Callable[[str, nn.Module], object]


def _call(model: nn.Module, blanks: Blanks, initialise: Initialise, seed: int) -> None:
    """For every module that has a blank tensor in it, with memory for those of its own that live elsewhere: it draws the same
    numbers for its tensors wherever they are.
    """
    for name, module in _children_first(model):
        held = [*module.parameters(), *module.buffers(), *_attributes(module)]
        if not any(tensor in blanks for tensor in held):
            continue
        kept = [tensor for tensor in held if blanks.has_values(tensor)]
        direct = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        with torch.no_grad(), preserved(kept), with_memory(direct), _in_place(module), _drawing(seed, name):
            try:
                initialise(name, module)
            except Exception as error:
                raise InputError(
                    "a module of the model cannot be given values",
                    where=f"{name or 'the model'}, a {type(module).__name__}",
                    why=f"{type(error).__name__}: {error}",
                    hint="init= a function that knows how, and does nothing for other modules",
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
    """What a method makes anew goes into the tensor that was there, which the stages know."""
    tables: list[dict[str, Any]] = [
        table for part in module.modules() for table in (part._parameters, part._buffers, vars(part))
    ]
    held = [
        (table, name, value) for table in tables for name, value in table.items() if isinstance(value, torch.Tensor)
    ]
    yield
    for table, name, value in held:
        made = table.get(name)
        if made is not value and isinstance(made, torch.Tensor) and made.shape == value.shape:
            if not value.is_meta and not made.is_meta:
                value.copy_(made)
            table[name] = value


@contextmanager
def _drawing(seed: int, name: str) -> Iterator[None]:
    cards = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(cards):
        torch.manual_seed(int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
        yield


def _reset(model: nn.Module) -> Initialise:
    """A module's own method, then what the nearest model around it has for modules, as those of transformers."""
    modules = dict(model.named_modules())

    def initialise(name: str, module: nn.Module) -> None:
        own = getattr(module, RESET, None) or getattr(module, f"_{RESET}", None)
        if callable(own):
            own()
        parts = name.split(".") if name else []
        around = (modules[".".join(parts[:count])] for count in range(len(parts), -1, -1))
        taking = next((m._init_weights for m in around if _takes_a_module(getattr(m, "_init_weights", None))), None)
        if taking is not None:
            taking(module)

    return initialise


def _takes_a_module(method: object) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True
