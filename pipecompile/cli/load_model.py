"""Models and inputs from their text: `torchvision:resnet18` becomes a module, `4x3x64x64` a random tensor."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipecompile.cli.transformers_model import transformers_model
from pipecompile.errors import InputError, PipecompileError, described
from pipecompile.text.shown_value import shown

if TYPE_CHECKING:
    import torch

__all__ = ["ModelSource", "load_model", "random_input", "seed_number"]

_LEAST_SEED, _MOST_SEED = -(2**63), 2**63 - 1
"""The seeds that torch takes, and that have room for a step's number."""

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_TOKENS = 10
"""Exclusive upper bound of random whole numbers: small enough to index any embedding."""


def seed_number(text: str) -> int:
    """Return the number of a seed. Raise BadParameter for a text that is none that torch takes."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{shown(text)} is not a whole number") from None
    if not _LEAST_SEED <= number <= _MOST_SEED:
        raise typer.BadParameter(f"{number} is not in the range -2**63 to 2**63 - 1")
    return number


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The text of a model and of a mini-batch for it."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME, hf:NAME or package.module:factory")
    ]
    inputs: Annotated[
        list[str], typer.Option("--input", metavar="SHAPE[:DTYPE]", help="one per input: 32x3x224x224, 2x128:int64")
    ]
    seed: Annotated[
        int,
        typer.Option(
            parser=seed_number, metavar="N", show_default="0", help="seed of the weights and of the random data"
        ),
    ] = 0

    def load(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """Return the model and its inputs. Equal seeds give equal weights and data."""
        import torch

        torch.manual_seed(self.seed)
        model = load_model(self.model)
        return model, tuple(random_input(text) for text in self.inputs)


def random_input(text: str) -> torch.Tensor:
    """Return a random tensor of a shape `4x3x64x64`, or with a dtype `2x128:int64`. Raise InputError for other texts."""
    import torch

    match = _SHAPE.fullmatch(text)
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        plain = re.sub(r"\s*[x\u00d7X*,]\s*", "x", text.strip(" ()[]"))
        hint = "--input 32x3x224x224, or with a dtype of torch --input 2x128:int64"
        hint = f"--input {plain}" if plain != text and _SHAPE.fullmatch(plain) else hint
        raise InputError(f"--input {text!r} is not a shape", hint=hint)
    shape = [int(size) for size in match[1].split("x")]
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape).to(dtype)
        return torch.randint(0, 2 if dtype is torch.bool else _TOKENS, shape).to(dtype)
    except (RuntimeError, TypeError, OverflowError) as error:  # a size beyond all integers of torch is a TypeError
        raise InputError(
            f"--input {text!r} cannot be made", why=str(error).split("\n")[0], hint="a smaller batch"
        ) from None


def load_model(spec: str) -> torch.nn.Module:
    """Return a model with random weights; nothing is downloaded. Raise InputError that has the unknown part of the name."""
    import torch

    source, colon, name = spec.partition(":")
    if source.endswith(".py"):
        module = ".".join(Path(source.removesuffix(".py")).parts).lstrip("./")
        raise InputError(
            f"{source!r} is a file, not a module", hint=f"{module}:{name or 'build'}, from the folder of the file"
        )
    if not colon or not source.strip(".") or source[0] == "." or not name:
        dotted = re.fullmatch(r"([\w.]+)\.(\w+)", spec)
        meant = f"{dotted[1]}:{dotted[2]}; the forms are " if dotted else ""
        raise InputError(
            f"{spec!r} names no model",
            hint=f"{meant}torchvision:resnet50, timm:NAME, hf:llama or package.module:factory",
        )
    build = {"torchvision": _torchvision, "timm": _timm, "hf": transformers_model}.get(source)
    model = build(name) if build else _factory(source, name)
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{spec} is not a torch.nn.Module", why=f"the name stands for an object of {type(model).__name__}"
        )
    return model


def _torchvision(name: str) -> object:
    models = _import("torchvision.models", "pip install torchvision")
    if name not in models.list_models():
        raise _unknown(name, "torchvision", models.list_models())
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    options = {"weights": None} | ({"weights_backbone": None} if "weights_backbone" in accepted else {})
    return models.get_model(name, **options)


def _timm(name: str) -> object:
    timm = _import("timm", "pip install timm")
    if not timm.is_model(name):
        raise _unknown(name, "timm", timm.list_models())
    return timm.create_model(name, pretrained=False)


def _unknown(name: str, library: str, known: Sequence[str]) -> InputError:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    nearest = nearest or list(known[:3])
    return InputError(f"{library} has no model {name!r}", hint=", ".join(f"{library}:{one}" for one in nearest))


def _factory(module_name: str, name: str) -> object:
    """Return the result of a callable of a module, or an nn.Module there. The current directory counts, as for `python -m`."""
    import torch

    if "" not in sys.path:
        sys.path.insert(0, "")
    target: Any = _import(module_name, "run it where the module can be imported from, or set PYTHONPATH")
    for part in name.split("."):
        if not hasattr(target, part):
            nearest = difflib.get_close_matches(part, dir(target), n=3) or _defined_in(target)
            raise InputError(f"{module_name} has no {name!r}", where=_file(target), hint=", ".join(nearest))
        target = getattr(target, part)
    if isinstance(target, torch.nn.Module) or not callable(target):
        return target
    return _called(target, f"{module_name}:{name}")


_OF_A_FILE = 30
"""Number of functions and classes above which a module is taken for a library such as torch, in which no model is meant."""


def _defined_in(module: object) -> list[str]:
    """Return up to three functions and classes that a user's module defines; of a module with many, the names of libraries of models."""
    own = getattr(module, "__name__", None)
    defined = [
        name
        for name in dir(module)
        if callable(value := getattr(module, name, None)) and getattr(value, "__module__", "") == own
    ]
    is_library = not defined or len(defined) > _OF_A_FILE
    return ["torchvision:NAME, timm:NAME or hf:NAME"] if is_library else defined[:3]


def _called(factory: Callable[[], object], spec: str) -> object:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError(
            f"{spec} cannot be called without arguments",
            why=str(error),
            hint="a function without parameters that calls it",
        ) from None
    except ValueError:
        pass
    try:
        return factory()
    except PipecompileError:
        raise
    except Exception as error:
        raise InputError(f"{spec} raised {described(error)}", where=_last_line(error)) from error


def _import(name: str, hint: str) -> Any:
    """Import a module. Raise InputError if it does not exist; of a failure inside it, with the line of the failing import."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"there is no module {error.name!r}", hint=hint) from None
        raise _failed_import(name, error) from error
    except PipecompileError:
        raise
    except Exception as error:
        raise _failed_import(name, error) from error


def _failed_import(name: str, error: Exception) -> InputError:
    return InputError(
        f"importing {name!r} failed: {described(error)}",
        where=_last_line(error), why="the module exists, its code failed" if not isinstance(error, ImportError) else "the module exists, an import inside it failed",
    )  # fmt: skip


def _last_line(error: Exception) -> str:
    """Return file and line of the user's code where an exception was raised."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _file(module: object) -> str:
    return str(getattr(module, "__file__", "") or "")
