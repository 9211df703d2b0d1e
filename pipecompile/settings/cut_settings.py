"""Options of the cut: its number of stages, its solver, and the user's constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from pipecompile.errors import InputError, PlanError, described
from pipecompile.graph.cut_constraints import CutConstraints
from pipecompile.ir.plan import DAMAGED, Plan
from pipecompile.settings.value_checks import Group, choice, entries, number, refusal, whole_number
from pipecompile.text.input_checks import near
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["CutSettings", "check_module_name", "resolve_constraints", "stage_count"]


def _plan(name: str, value: Any) -> Plan | None:
    """Return a plan, or read it from its file. Raise PlanError for a damaged file."""
    if isinstance(value, (str, Path)):
        return Plan.load(value)
    if value is not None and not isinstance(value, Plan):
        raise refusal(
            name, value, "a plan nor the path of one", hint=f'{name}="plan.json", as pipe.plan.save writes it'
        )
    return None if value is None else _with_types(name, value)


def _with_types(name: str, plan: Plan) -> Plan:
    """Return a plan with the types that its file would have. Raise PlanError for one that was made by hand and has others."""
    try:
        typed = Plan.from_json(plan.to_json())
        return plan if typed == plan else typed
    except PlanError as error:
        what = error.what if error.what.startswith(DAMAGED) else "the plan has parts of other types"
        raise PlanError(f"{name}=: {what}", why=error.why or error.what, hint=error.hint) from None
    except Exception as error:  # what cannot be written as JSON
        raise PlanError(f"{name}=: the plan has parts of other types", why=described(error)) from None


def _gap(name: str, value: Any) -> float:
    """Return a fraction from 0 to below 1."""
    gap: float = number(0.001, zero=True)(name, value)
    if gap >= 1:
        raise refusal(name, value, "a fraction below 1", hint=f"{name}=0.001")
    return gap


stage_count = whole_number(4, most=10_000)
"""The check of `n_stages`."""


@dataclass(frozen=True, kw_only=True)
class CutSettings(Group):
    """Number of stages, solver with its limit in seconds and its gap as a fraction, and constraints. With a `plan` nothing is solved."""

    n_stages: Annotated[int, stage_count]
    partitioner: Annotated[str, choice("auto", "dp", "ilp")]
    time_limit: Annotated[float, number(30, finite=False)]
    gap: Annotated[float, _gap]
    plan: Annotated[Plan | None, _plan]
    tied: Annotated[str, choice("auto", "together", "apart")]
    steering: CutConstraints

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None and self.plan.n_stages != self.n_stages:
            raise InputError(
                f"the plan has {counted(self.plan.n_stages, 'stage')}, n_stages is {self.n_stages}",
                hint=f"n_stages={self.plan.n_stages}, or no plan",
            )


def resolve_constraints(
    model: nn.Module, n_stages: int, *, split_before: Any, keep_together: Any, pin: Any, balance: Any
) -> CutConstraints:
    """Return the constraints that the keywords force on the cut. Raise InputError for wrong types, stages that do not exist, and
    names that neither a module nor a node of the recording can have.
    """
    hint = f"split_before={[split_before if isinstance(split_before, str) else 'layer3']}"
    before = entries("split_before", split_before, _text, "a list of names of modules", hint)
    together = _groups(model, keep_together)
    pins = _pins(pin, n_stages)
    counts = None if balance is None else _balance(model, n_stages, balance)
    for option, names in (("split_before", before), ("keep_together", _flat(together)), ("pin", pins)):
        for name in names:
            check_module_name(option, name, model)
    return CutConstraints.of(model, split_before=before, keep_together=together, pins=pins, balance=counts)


def check_module_name(option: str, name: str, model: nn.Module) -> None:
    """Raise InputError for a name that no node of a recording can match. A name without a dot may be that of a node: names are
    compared with the recording later.
    """
    known = [module for module, _ in model.named_modules(remove_duplicate=False) if module]
    if "." in name and name not in known:
        raise InputError(
            f"{option}: the model has no module {shown(name)}",
            hint=f"{near(name, known)!r} in its place" if known else f"{option} without it",
        )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(name, value, "the name of a module", hint=f'{name}=["layer3"]')
    return value


def _groups(model: nn.Module, value: Any) -> tuple[Any, ...]:
    """Return the entries of `keep_together`: names, tuples of names, and classes of modules of the model."""
    hint = (
        f"keep_together={[value]}" if isinstance(value, str) else 'keep_together=["encoder", ["head", "norm"], Block]'
    )
    kinds = {type(module).__name__ for module in model.modules()}

    def check(name: str, entry: Any) -> Any:
        if isinstance(entry, type):
            if not any(isinstance(module, entry) for part, module in model.named_modules() if part):
                why = f"the model has modules of the classes {', '.join(sorted(kinds))}"
                raise InputError(
                    f"keep_together: the model has no {entry.__name__}", why=why, hint=near(entry.__name__, kinds)
                )
            return entry
        names = entry if isinstance(entry, str) else entries(name, entry, _text, "names of modules", hint)
        if not names and not isinstance(entry, str):
            raise InputError("keep_together: a list in it is empty", hint=hint)
        return names

    if isinstance(value, (list, tuple)):
        return tuple(check("keep_together", entry) for entry in value)  # an entry's own error says more
    return entries("keep_together", value, check, "a list of names of modules, lists of names, or classes", hint)


def _flat(groups: Sequence[Any]) -> list[str]:
    return [
        name
        for group in groups
        if not isinstance(group, type)
        for name in ((group,) if isinstance(group, str) else group)
    ]


def _pins(value: Any, n_stages: int) -> dict[str, int]:
    hint = f'pin={{"head": {n_stages - 1}}}'
    if not isinstance(value, Mapping | None):
        raise refusal("pin", value, "a mapping of names of modules to stages", hint=hint)
    check = whole_number(0, least=0)
    pins = {}
    for name, stage in (value or {}).items():
        try:
            pins[_text("pin", name)] = check("pin", stage)
        except InputError:
            pins[name] = n_stages
        if pins[name] >= n_stages:
            expected = f"a stage from 0 to {n_stages - 1} per module"
            raise refusal("pin", value, expected, where=f"entry {shown(name)}: {shown(stage)}", hint=hint) from None
    return pins


def _balance(model: nn.Module, n_stages: int, value: Any) -> tuple[int, ...]:
    names = [name for name, _ in model.named_children()]
    even = [len(names) // n_stages + (stage < len(names) % n_stages) for stage in range(n_stages)]
    hint = f"balance={even}" if all(even) else f"n_stages={max(len(names), 1)}, or no balance"
    counts = entries("balance", value, whole_number(1, least=1), "a number of the model's children per stage", hint)
    if len(counts) != n_stages:
        raise refusal("balance", counts, f"one entry per stage: {len(counts)} for {n_stages}", hint=hint)
    if sum(counts) != len(names):
        raise InputError(
            f"balance adds up to {sum(counts)}, the model has {len(names)} children",
            where=", ".join(names[:8]) + (" ..." if len(names) > 8 else ""), hint=hint,
        )  # fmt: skip
    return counts
