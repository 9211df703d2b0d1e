"""A group of options: a frozen dataclass whose fields name their checks.

n_stages: Annotated[int, whole_number(4)]        checked, and made canonical, whenever a group is constructed or replaced
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pipecompile.settings.value_checks import Check

__all__ = ["Group", "checks_of"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Base of the groups. Construction runs the check of every field and keeps its result."""

    def __post_init__(self) -> None:
        for name, check in checks_of(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, name, check(name, getattr(self, name)))


@cache
def checks_of(kind: type[Any]) -> dict[str, Check]:
    """Return the check of every field that has one, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
