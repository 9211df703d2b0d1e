"""The table of warnings in docs/exactness.md: a row for each warning of a pipeline."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecompile.distributed import loss_parameters
from pipecompile.distributed.agreement import first_values, state_of_copies, update_differences, weights_of_copies
from pipecompile.driver import compile_context, left_on_ranks, loss_reads, repeated_changes, tables_of_model
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.runtime import forward_order, held_hooks, hooked_updates, thread_state
from pipecompile.runtime.cuda_graphs.stage_graphs import StageGraphs
from pipecompile.runtime.cuda_graphs.step_graphs import StepGraphs
from pipecompile.runtime.random_draws import Draws
from pipecompile.tracing.emit import call_objects, node_writer
from pipecompile.tracing.guards import executed_code
from pipecompile.tracing.interception import changing_functions
from pipecompile.tracing.state import filled_arguments, function_state

PAGE = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text()
SILENT = {"evicted", "once", "check_options", "give_delayed", "drop_delayed"}
"""Methods that give no warning of their own; `check_options` is looked at for its text on CUDA graphs."""


def beginnings() -> list[str]:
    """Return the first column of the table, a pattern for each beginning of a warning."""
    table = PAGE.partition("| it begins |")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    phrases = [phrase for cell in cells for phrase in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"NAME|\d+", ".*", re.escape(phrase)) for phrase in phrases]


def texts(function: object) -> Iterator[str]:
    """Yield the strings of a function, with X in the place of every value that is formatted into them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def warnings_of_draws() -> list[str]:
    """Return the texts that `drawn` is given."""
    return [Draws((0,), backward).warning(threaded=False) for backward in ((), (1,))]


METHODS = {name: method for name, method in vars(WarningsOnce).items() if inspect.isfunction(method)}
GIVING = [name for name in METHODS if not name.startswith("_") and name not in SILENT]


@pytest.mark.parametrize("name", GIVING)
def test_each_warning_has_a_row(name: str) -> None:
    found = [*texts(METHODS[name])]
    if any(part in text for part in ("samples go into", "recorded anew for", "at once go another") for text in found):
        found += texts(METHODS["_at"])
    if name == "drawn":
        found += warnings_of_draws()
    assert any(re.search(pattern, text) for pattern in beginnings() for text in found), f"{name}: {found}"


def test_each_row_has_a_warning() -> None:
    given = [text for method in METHODS.values() for text in texts(method)]
    given += [*(f"stage X {text}" for text in texts(StageGraphs)), *texts(StepGraphs)]
    given += warnings_of_draws()
    given += [
        *texts(hooked_updates),
        *texts(held_hooks),
        *texts(repeated_changes),
        *texts(executed_code),
        *texts(compile_context),
        *texts(filled_arguments),
        *texts(changing_functions),
        *texts(function_state),
        *texts(left_on_ranks),
        *texts(loss_reads),
        *texts(loss_parameters),
        *texts(first_values),
        *texts(update_differences),
        *texts(weights_of_copies),
        *texts(state_of_copies),
        *texts(thread_state),
        *texts(forward_order),
        *texts(node_writer),
        *texts(call_objects),
        *texts(tables_of_model),
    ]
    for pattern in beginnings():
        assert any(re.search(pattern, text) for text in given), f"{pattern} begins no warning"
