"""Options that several commands share, declared once as the fields of a dataclass.

@dataclass                                       @spread
class ModelSource:                                    def check(source: ModelSource, evaluate: Evaluate = False): ...
    model: Annotated[str, Argument()]
    seed: Annotated[int, Option()] = 0           typer sees check(*, model, seed=0, evaluate=False)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

__all__ = ["spread"]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of each dataclass among its parameters as parameters of their own."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    shared = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}

    @wraps(command)
    def spread_command(**values: Any) -> None:
        groups = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in shared.items()}
        command(**groups, **values)

    parameters = [
        each
        for parameter in own
        for each in (
            _parameters(shared[parameter.name])
            if parameter.name in shared
            else [parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    ]
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spread_command


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
