"""Constraints of the user on the cut, in names of modules, and their translation to the nodes of a graph.

split_before=["layer3.0"]    stage(a) < stage(b) for every edge a ─▶ b into layer3.0
keep_together=["layer2"]     all its nodes share a stage
pin={"head": 3}              all its nodes are in stage 3
balance=[3, 4, 2]            the first three children of the model are in stage 0, the next four in stage 1 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx, nn

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import module_of, nodes_of_module
from pipecompile.partitioners import Problem

__all__ = ["CutConstraints"]

Together = str | type[nn.Module] | Sequence[str]


@dataclass(frozen=True, slots=True)
class CutConstraints:
    """Constraints by names of modules. `balanced` are (child of the model, stage), `of_classes` the modules in
    `together` that a class stands for. False without constraints.
    """

    split_before: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    pins: tuple[tuple[str, int], ...] = ()
    balanced: tuple[tuple[str, int], ...] = ()
    of_classes: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        split_before: Sequence[str],
        keep_together: Sequence[Together],
        pins: Mapping[str, int],
        balance: Sequence[int] | None,
    ) -> CutConstraints:
        """Return the constraints of arguments that settings/cut_settings.py has checked: classes become their modules, and a balance
        the stages of the model's children.
        """
        together = tuple(group for entry in keep_together for group in _groups(model, entry))
        balanced = () if balance is None else tuple(_balanced(model, balance))
        classes = [name for entry in keep_together if isinstance(entry, type) for (name,) in _groups(model, entry)]
        named = {name for entry in keep_together if not isinstance(entry, type) for name, *_ in _groups(model, entry)}
        return cls(tuple(split_before), together, tuple(pins.items()), balanced, frozenset(classes) - named)

    def __bool__(self) -> bool:
        return bool(self.split_before or self.together or self.pins or self.balanced)

    def on(self, graph: fx.GraphModule, problem: Problem) -> Problem:
        """Return the problem with the constraints. Raise InputError for names that the graph does not have."""
        pins = problem.pins | self.pinned(graph)
        apart = [pair for name in self.split_before for pair in _entering(graph, problem, name)]
        groups = [
            tuple(node for name in names for node in nodes_of_module(graph, name, "keep_together"))
            for names in self.together_on(graph)
        ]
        return replace(
            problem, pins=pins, apart=(*problem.apart, *dict.fromkeys(apart)),
            groups=(*problem.groups, *(group for group in groups if len(group) > 1)),
        )  # fmt: skip

    def pinned(self, graph: fx.GraphModule) -> dict[str, int]:
        """Return node -> stage of `pin` and `balance`. Raise InputError for a node that two of them put into different stages."""
        ran = {module_of(node).split(".")[0] for node in compute_nodes(graph)}
        balanced = [entry for entry in self.balanced if entry[0] in ran]  # a child that does not run has no stage
        options = [*(("pin", *entry) for entry in self.pins), *(("balance", *entry) for entry in balanced)]
        by: dict[str, tuple[str, int]] = {}
        for option, name, stage in options:
            for node in nodes_of_module(graph, name, option):
                words, before = by.setdefault(node, (f"{option} has {name!r}", stage))
                if before != stage:
                    raise InputError(
                        f"{words} in stage {before}, and {option} has {name!r} in stage {stage}",
                        where=f"node {node!r} is of both", hint="one of the two, or names of modules that share no nodes",
                    )  # fmt: skip
        return {node: stage for node, (_, stage) in by.items()}

    def together_on(self, graph: fx.GraphModule) -> list[tuple[str, ...]]:
        """Return the groups without those of a class's modules that do not run, unless none of them runs."""
        paths = [f"{module_of(node)}." for node in compute_nodes(graph)]
        ran = {name for name in self.of_classes if any(path.startswith(f"{name}.") for path in paths)}
        idle = self.of_classes - ran if ran else frozenset[str]()
        return [names for names in self.together if not idle.issuperset(names)]

    def marks(self, graph: fx.GraphModule, stage_of: Mapping[str, int], n_stages: int) -> tuple[tuple[str, ...], ...]:
        """Return per stage its constraints, as words for the table."""
        marks: list[list[str]] = [[] for _ in range(n_stages)]
        for name, stage in self.pins:
            marks[stage].append(f"pin {name}")
        for name in self.split_before:
            marks[stage_of[nodes_of_module(graph, name, "split_before")[0]]].append(f"split before {name}")
        for names in self.together_on(graph):
            marks[stage_of[nodes_of_module(graph, names[0], "keep_together")[0]]].append(f"together {', '.join(names)}")
        for stage in sorted({stage for _, stage in self.balanced}):
            marks[stage].append("balance")
        return tuple(tuple(dict.fromkeys(words)) for words in marks)


def _groups(model: nn.Module, entry: Together) -> Iterable[tuple[str, ...]]:
    """Return the groups of one entry: a module, several modules, or every module of a class by itself."""
    if isinstance(entry, str):
        return [(entry,)]
    if not isinstance(entry, type):
        return [tuple(entry)]
    return [(name,) for name, module in model.named_modules() if name and isinstance(module, entry)]


def _balanced(model: nn.Module, balance: Sequence[int]) -> Iterable[tuple[str, int]]:
    """Return the stage of each child of the model: `balance[s]` children are in stage s."""
    names, ends = [name for name, _ in model.named_children()], list(accumulate(balance))
    return [(name, next(s for s, end in enumerate(ends) if place < end)) for place, name in enumerate(names)]


def _entering(graph: fx.GraphModule, problem: Problem, name: str) -> list[tuple[str, str]]:
    """Return the edges into a module. Raise InputError if there are none: the stage before would be empty."""
    inside = set(nodes_of_module(graph, name, "split_before"))
    pairs = [(a, b) for a, b in problem.precedence if b in inside and a not in inside]
    if not pairs:
        raise InputError(f"split_before: nothing runs before {name!r}", why="a stage before it would be empty")
    return pairs
