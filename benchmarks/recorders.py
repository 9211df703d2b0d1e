"""What `torch.fx.symbolic_trace`, `torch.export` and `pc.trace` make of small models that are easily recorded wrong.

    python benchmarks/recorders.py [--only REGEX] [--markdown benchmarks/results/recorders.md]

The models are those of tests/semantics. What is recorded is compared with the model itself in eager PyTorch, built anew from
the same seed: outputs, gradients of parameters and inputs, buffers, and what a call leaves on the model and on the random
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.export import Dim, ShapesCollection

import pipecompile as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.semantics.case import Case
from tests.semantics.observation import called, difference

Args = tuple[Any, ...]
Record = Callable[[nn.Module, Args], Callable[..., Any]]

THEMES = ("regions", "functions", "hooks", "modes", "state", "values")
SWITCHED = "modes, switched"
TRACED, CALLED = 6, (4, 3)
KINDS = ("right", "right, batch fixed", "silently wrong", "refused")

HEAD = """# Recorders

Small models that are easily recorded wrong ([tests/semantics](../../tests/semantics/models)), and what comes of each.
Made by `python benchmarks/recorders.py --markdown benchmarks/results/recorders.md` with torch {torch}.

Recorded with {traced} samples (export: with `Dim.AUTO` for them) and called with {called}, twice in training mode and then in
evaluation mode, recorded anew for it, unless the case names other modes. The last group is recorded once, in training
mode, and told `.eval()`: there pipecompile is `pc.compile` with one stage; elsewhere it is `pc.trace`, whose graph is of one mode.

- *wrong* is silent: nothing was raised, and what it names is not what eager PyTorch gives. *state* is what a call leaves on the
  model besides buffers, and the next random number; *mode* is anything, in the other mode.
- *refused* is an error, when recorded or when called; for pipecompile with its code ([docs/errors.md](../../docs/errors.md)).
- *batch fixed* is right, but only with as many samples as it was recorded with.
"""


@dataclass(frozen=True)
class Verdict:
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.removeprefix('silently ')}{': ' * bool(self.detail)}{self.detail}"


def export(model: nn.Module, args: Args) -> Callable[..., Any]:
    """With a free batch size; where that is refused, for these inputs alone."""
    shapes = ShapesCollection()
    for arg in args:
        shapes[arg] = {0: Dim.AUTO}
    try:
        return torch.export.export(model, args, dynamic_shapes=shapes, strict=False).module()
    except Exception:
        return torch.export.export(model, args, strict=False).module()


def compiled(model: nn.Module, args: Args) -> Callable[..., Any]:
    return pc.compile(model, 1, example_args=args, n_microbatches=1, cost="analytic", devices=["cpu"])


TOOLS: dict[str, Record] = {
    "symbolic_trace": lambda model, _args: fx.symbolic_trace(model),
    "export": export,
    "pipecompile": lambda model, args: pc.trace(model, *args),
}


def recorded_per_mode(model: nn.Module, case: Case, record: Record) -> Callable[..., Any]:
    made: dict[bool, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        if model.training not in made:
            with torch.random.fork_rng(devices=[]):
                made[model.training] = record(model, case.inputs(TRACED))
        return made[model.training](*args)

    return call


def recorded_once(model: nn.Module, case: Case, record: Record) -> Callable[..., Any]:
    if model.training != case.modes[0]:
        model.train(case.modes[0])
    with case.around():
        return record(model, case.inputs(TRACED))


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def looked_at(case: Case) -> Case:
    """The case, where a state that cannot be read is a wrong state, and not a refusal."""

    def left(model: nn.Module) -> Any:
        try:
            return case.left(model)
        except Exception as error:
            return f"cannot be read: {error}"

    return replace(case, left=left)


def attempt(case: Case, record: Record, sizes: Sequence[int], *, switched: bool) -> Verdict:
    """Record, call, go backward, and compare. A difference in another mode than the recorded one is one of `mode`."""
    eager = fresh(case)
    expected = called(eager, eager, case, sizes)
    model = fresh(case)
    try:
        make = recorded_once if switched else recorded_per_mode
        made = called(model, make(model, case, record), looked_at(case), sizes)
    except Exception as error:
        return Verdict("refused", reason(error))
    finally:
        torch.set_grad_enabled(True)
    found = re.match(r"(\w+): call \d+: (\w+)", difference(made, expected, case.tolerance))
    return Verdict("silently wrong", found[1 if switched else 2]) if found else Verdict("right")


def reason(error: BaseException) -> str:
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code else type(error).__name__


def classify(case: Case, record: Record, *, switched: bool = False) -> Verdict:
    """At other batch sizes than the recorded one. What refuses that may be wrong in its first call already, or right at one size."""
    verdict = attempt(case, record, CALLED, switched=switched)
    if verdict.kind != "refused":
        return verdict
    first = attempt(replace(case, modes=case.modes[:1]), record, CALLED[:1], switched=switched)
    if first.kind == "silently wrong":
        return first
    fixed = attempt(case, record, (TRACED, TRACED), switched=switched)
    return {"refused": verdict, "right": Verdict("right, batch fixed")}.get(fixed.kind, fixed)


def rows(only: str) -> Iterator[tuple[str, str, dict[str, Verdict]]]:
    """Theme, case and what each tool does with it."""
    for theme in (*THEMES, SWITCHED):
        switched = theme == SWITCHED
        cases = importlib.import_module(f"tests.semantics.models.{theme.partition(',')[0]}").CASES
        tools = TOOLS | {"pipecompile": compiled} if switched else TOOLS
        for name, case in cases.items():
            if not re.search(only, f"{theme}: {name}") or (switched and len(set(case.modes)) == 1):
                continue
            yield theme, name, {tool: classify(case, record, switched=switched) for tool, record in tools.items()}
            torch._dynamo.reset()


def counts(found: Sequence[tuple[str, str, dict[str, Verdict]]]) -> dict[str, Counter[str]]:
    return {tool: Counter(verdicts[tool].kind for _, _, verdicts in found) for tool in TOOLS}


def table(found: Sequence[tuple[str, str, dict[str, Verdict]]]) -> Table:
    result = Table("", *TOOLS, title=f"{len(found)} cases")
    for kind in KINDS:
        result.add_row(kind, *(str(count[kind]) for count in counts(found).values()), end_section=kind == KINDS[-1])
    for theme, name, verdicts in found:
        result.add_row(f"{theme}: {name}", *map(str, verdicts.values()))
    return result


def page(found: Sequence[tuple[str, str, dict[str, Verdict]]]) -> str:
    head = HEAD.format(torch=torch.__version__, traced=TRACED, called=" and ".join(map(str, CALLED)))
    lines = [head, f"| of {len(found)} cases | {' | '.join(KINDS)} |", "|---|--:|--:|--:|--:|"]
    for tool, count in counts(found).items():
        lines.append(f"| {tool} | {' | '.join(str(count[kind]) for kind in KINDS)} |")
    for theme in dict.fromkeys(theme for theme, _, _ in found):
        lines += [f"\n## {theme.capitalize()}\n", f"| | {' | '.join(TOOLS)} |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {' | '.join(map(cell, made.values()))} |" for where, name, made in found if where == theme
        ]
    return "\n".join(lines) + "\n"


def cell(verdict: Verdict) -> str:
    return f"**{verdict}**" if verdict.kind == "silently wrong" else str(verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression on 'theme: case'")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stderr(io.StringIO()):  # symbolic_trace and export print the graphs that they fail on
        found = list(rows(options.only))
    Console(width=140).print(table(found))
    if options.markdown:
        options.markdown.write_text(page(found))


if __name__ == "__main__":
    main()
