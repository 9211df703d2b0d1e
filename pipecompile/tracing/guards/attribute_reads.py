"""Notes of the attributes that Python reads while a model is recorded.

`nn.Module` and the classes of the objects that the model holds get a `__getattribute__` that notes (object, name, the user's line)
while the recording lasts. Classes of objects that are met on the way are added as they are met.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from pipecompile.torch_private.modules import CALL_MACHINERY
from pipecompile.torch_private.recurrent_layers import WEIGHT_LISTS
from pipecompile.tracing.container_items import CONTAINERS, values_in
from pipecompile.tracing.user_source import caller, folder_prefixes

__all__ = ["AttributeReads", "Reads", "can_be_watched"]

Reads = dict[str, str]
"""Per name that was read: the user's line of the first read, as "file:line in function"."""

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
_MACHINERY = nn.Module.__getattr__.__code__.co_filename
"""File of `nn.Module`, which reads `__dict__` to find parameters, buffers and children."""

_OWN_FILES = folder_prefixes(Path(__file__).parents[2])

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Tensor, type, FunctionType, MethodType, ModuleType)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "numpy", "pipecompile"}
_WATCHED_FOREIGN = ("argparse", "collections")
_ITEMS = 10_000
"""Items of one container whose classes are looked at; the reads of further items count as reads of everything."""


class AttributeReads:
    """A context in which reads of this thread are noted. `watched` are the classes whose reads are noted.

    `executed` has the user's code that ran and its globals, by the id of the code (`ExecutedCode`). Of that in `without_functions`,
    the first read of the state found no function. `inlined` are the ids of the modules that are recorded through.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self.noted: dict[int, tuple[Any, Reads]] = {}
        self.executed: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self.without_functions = set[int]()
        self.inlined = set[int]()
        self.watched: set[type] = set()
        self._originals: list[tuple[type, Any]] = []
        self._sealed: set[type] = set()
        self._scanned: dict[int, Any] = {}
        self._roots, self._thread = tuple(roots), get_ident()
        self._only: frozenset[int] | None = None

    def __enter__(self) -> Self:
        self._thread = get_ident()
        self._watch(nn.Module)
        for root in self._roots:
            self._meet(root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cls, original in self._originals:
            if original is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = original  # type: ignore[method-assign]
        self._originals.clear()
        self._scanned.clear()

    @contextmanager
    def of_layer(self, layer: nn.Module) -> Iterator[None]:
        """Note reads of this layer alone inside the block: its node calls the layer and its hooks at every run."""
        before, self._only = self._only, frozenset(map(id, layer.modules()))
        try:
            yield
        finally:
            self._only = before

    def note_path(self, value: Any, names: Iterable[str]) -> None:
        """Note the read of an attribute of an object, of an attribute of that one, and so on. The last may be missing."""
        for name in names:
            self.noted.setdefault(id(value), (value, {}))[1].setdefault(name, caller())
            self._meet(value := getattr(value, name, None))

    def is_watched(self, value: Any) -> bool:
        """Return whether the reads of this object were noted."""
        return any(cls in self.watched for cls in type(value).__mro__)

    def reads_of(self, value: Any) -> Reads:
        """Return the names that were read on an object."""
        return self.noted.get(id(value), (None, {}))[1]

    def _watch(self, cls: type) -> None:
        """Note the reads of the instances of a class from now on; not, if its metaclass refuses new attributes."""
        try:
            plain = cls.__dict__.get("__getattribute__")
            cls.__getattribute__ = self._noting(cls.__getattribute__)  # type: ignore[assignment,arg-type,method-assign]
        except (TypeError, AttributeError):
            self._sealed.add(cls)
            return
        self.watched.add(cls)
        self._originals.append((cls, plain))

    def _noting(self, plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        noted, thread = self.noted, self._thread

        def __getattribute__(instance: Any, name: str) -> Any:  # noqa: N807 the method of a class
            if get_ident() != thread or (self._only is not None and id(instance) not in self._only):
                return plain(instance, name)
            entry = noted.get(id(instance))
            if entry is None:
                entry = noted[id(instance)] = instance, {}
            if name in entry[1] or _is_own_read(sys._getframe(1), name) or _follows_from_weights(instance, name):
                return plain(instance, name)
            entry[1][name] = caller()
            value = plain(instance, name)
            self._meet(value)
            return value

        return __getattribute__

    def _meet(self, value: Any) -> None:
        """Watch the class of a value that was read, and the classes of its items."""
        pending = [value]
        while pending:
            value = pending.pop()
            if type(value) in _PLAIN or id(value) in self._scanned:
                continue
            if isinstance(value, CONTAINERS):
                self._scanned[id(value)] = value
                pending += islice(values_in(value), _ITEMS)
            is_known = type(value) in self._sealed or self.is_watched(value)
            if not is_known and can_be_watched(type(value)):
                self._watch(type(value))


def _is_own_read(frame: FrameType | None, name: str) -> bool:
    """Return whether a frame reads an attribute for the recorder, or a `__dict__` as the lookup of a parameter or child."""
    if name == "__dict__" and frame is not None and frame.f_code.co_filename == _MACHINERY:
        return True
    while frame is not None and frame.f_code.co_filename == _MACHINERY and frame.f_code.co_name not in CALL_MACHINERY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES)


def _follows_from_weights(instance: Any, name: str) -> bool:
    """Return whether an attribute is a list that a recurrent layer keeps of its weights, which are guarded themselves."""
    return name in WEIGHT_LISTS and isinstance(instance, nn.RNNBase)


def can_be_watched(cls: type) -> bool:
    """Return whether a class is the user's own and may get another `__getattribute__`."""
    package = cls.__module__.partition(".")[0]
    if package in _FOREIGN and package not in _WATCHED_FOREIGN:
        return False
    is_open = bool(cls.__flags__ & _HEAP_TYPE) and not cls.__flags__ & _IMMUTABLE_TYPE
    return is_open and not issubclass(cls, (type, enum.Enum, BaseException, torch.Tensor))
