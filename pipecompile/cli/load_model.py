"""What a user types, made real: `torchvision:resnet18` becomes a module, `4x3x64x64` a random tensor."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipecompile.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "load_model", "random_input"]

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_TOKENS = 10
"""Random whole numbers are below this, so that they can index any embedding."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model and a mini-batch for it come from, as typed."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME or package.module:factory")]
    inputs: Annotated[
        list[str], typer.Option("--input", metavar="SHAPE[:DTYPE]", help="32x3x224x224, 2x128:int64; one each")
    ]
    seed: Annotated[int, typer.Option(help="of the weights and the random data")] = 0

    def load(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """The model and its inputs; equal seeds give equal weights and data."""
        import torch

        torch.manual_seed(self.seed)
        model = load_model(self.model)
        return model, tuple(random_input(text) for text in self.inputs)


def random_input(text: str) -> torch.Tensor:
    """`4x3x64x64`, or with a dtype `2x128:int64`. Raises InputError."""
    import torch

    match = _SHAPE.fullmatch(text)
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        hint = "sizes joined by x and, if it is not float32, a dtype of torch: 32x3x224x224 or 2x128:int64"
        raise InputError(f"--input {text!r} is not a shape", hint=hint)
    shape = [int(size) for size in match[1].split("x")]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else _TOKENS, shape).to(dtype)


def load_model(spec: str) -> torch.nn.Module:
    """Random weights, nothing is downloaded. Raises InputError that says which name could not be found."""
    import torch

    source, colon, name = spec.partition(":")
    if not colon or not source or not name:
        raise InputError(f"{spec!r} names no model", hint="torchvision:resnet50, timm:NAME or package.module:factory")
    build = {"torchvision": _torchvision, "timm": _timm}.get(source)
    model = build(name) if build else _factory(source, name)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{spec} is no torch.nn.Module", why=f"it gave {type(model).__name__}")
    return model


def _torchvision(name: str) -> object:
    from_torchvision = _import("torchvision.models", "pip install torchvision")
    if name not in from_torchvision.list_models():
        raise _unknown(name, "torchvision", from_torchvision.list_models())
    taken = inspect.signature(from_torchvision.get_model_builder(name)).parameters
    options = {"weights": None} | ({"weights_backbone": None} if "weights_backbone" in taken else {})
    return from_torchvision.get_model(name, **options)


def _timm(name: str) -> object:
    timm = _import("timm", "pip install timm")
    if not timm.is_model(name):
        raise _unknown(name, "timm", timm.list_models())
    return timm.create_model(name, pretrained=False)


def _unknown(name: str, library: str, known: Sequence[str]) -> InputError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return InputError(f"{library} has no model {name!r}", hint=", ".join(near))


def _factory(module_name: str, name: str) -> object:
    """A callable of a module (or an nn.Module there); the current directory counts, as it does for `python -m`."""
    import torch

    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = _import(module_name, "run it where the module can be imported from, or set PYTHONPATH")
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            raise InputError(f"{module_name} has no {name!r}", where=_file(found), hint=", ".join(near))
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module) or not callable(found):
        return found
    return _called(found, f"{module_name}:{name}")


def _called(factory: Callable[[], object], spec: str) -> object:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError(
            f"{spec} cannot be called without arguments", why=str(error), hint="wrap it in a function"
        ) from None
    except ValueError:
        pass
    return factory()


def _import(name: str, hint: str) -> Any:
    """Import a module; a failure *inside* it is told as such, with the missing name and the line that wanted it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"there is no module {error.name!r}", hint=hint) from None
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise InputError(
            f"importing {name!r} failed: {error}", where=where, why="the module itself was found"
        ) from error


def _file(found: object) -> str:
    return str(getattr(found, "__file__", "") or "")
