"""Changes that a training script makes to a model between two steps: does the pipeline compute what the changed model computes?

    python benchmarks/changed_models.py [--only TEXT] [--cells 8] [--markdown benchmarks/results/changed_models.md]

Per kind of change (tests/support/model_changes.py): a step and a call, in training and in evaluation mode, compiled with and without
a plan file. After the change, loss, outputs, gradients and buffers are compared with the changed model in plain micro-batches.

    right       equal, and nothing was recorded anew: the graph reads the changed value at every run
    anew        equal, and the model was recorded anew
    refused     an error of pipecompile
    DIFFERENT   silently different
    no change   the change makes no difference to eager in this mode, and the results are equal
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pipecompile as pc  # noqa: E402
from tests.support.model_changes import CHANGES, Net, globals_restored  # noqa: E402

COUNT = 2


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def pipeline(plan: str | None) -> pc.Pipeline:
    torch.manual_seed(0)
    return pc.compile(
        Net(),
        2,
        devices=["cpu"] * 2,
        loss_fn=loss_of,
        cost="analytic",
        n_microbatches=COUNT,
        batch_norm="each",
        plan=plan,
    )


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: b.clone() for name, b in model.named_buffers()}


def run(kind: str, runner: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what one step or call gives, and what it leaves on the model, which gets its buffers back."""
    model = runner.model if isinstance(runner, pc.Pipeline) else runner
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    if kind == "step":
        result = runner.step(x) if isinstance(runner, pc.Pipeline) else eager_step(runner, x)
    else:
        result = runner(x) if isinstance(runner, pc.Pipeline) else torch.cat([runner(part) for part in x.chunk(COUNT)])
        if result.requires_grad:
            loss_of(result).backward()
    found = {"result": result.detach()} | state(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return found


def eager_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for part in x.chunk(COUNT):
        loss = loss_of(model(part)) / COUNT
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


def is_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.allclose(found[name], value, rtol=1e-5, atol=1e-6, equal_nan=True)
        for name, value in expected.items()
    )


def outcome(name: str, kind: str, mode: str, plan: str | None) -> str:
    """Return the outcome of one cell."""
    with globals_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe, x = pipeline(plan), torch.randn(8, 4)
        pipe.train(mode == "train")
        before = run(kind, pipe, x)
        assert is_equal(before, run(kind, pipe.model, x)), "different before any change"
        CHANGES[name](pipe.model)
        x = x.to(next(pipe.model.parameters()).dtype)
        try:
            expected = run(kind, pipe.model, x)
        except Exception:
            return "eager fails"
        traces = pipe.explain().traces
        try:
            found = [run(kind, pipe, x) for _ in range(2)]
        except pc.PipecompileError:
            return "refused"
        if not all(is_equal(one, expected) for one in found):
            return "DIFFERENT"
        if pipe.explain().traces > traces + 1:
            return "ANEW AT EVERY STEP"
        return "anew" if pipe.explain().traces > traces else "no change" if is_equal(expected, before) else "right"


COLUMNS = [
    (kind, mode, plan) for kind in ("step", "call") for mode in ("train", "eval") for plan in ("", ", plan file")
]


def columns_of(number: int, cells: int) -> set[int]:
    """Return the columns that kind `number` runs: all, or `cells` of them, others for each kind."""
    return {(number + 3 * i) % len(COLUMNS) for i in range(cells)}


def table(names: list[str], cells: int) -> tuple[list[list[str]], Counter[str]]:
    """Return a row per kind of change, and the number of cells of each outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        paths = {mode: f"{path}.{mode}" for mode in ("train", "eval")}
        for mode, file in paths.items():
            pipe = pipeline(None)
            pipe.train(mode == "train").prepare(torch.randn(8, 4))
            pipe.plan.save(file)
        count: Counter[str] = Counter()
        rows = []
        for number, name in enumerate(names):
            chosen = columns_of(number, cells)
            row = [
                outcome(name, kind, mode, paths[mode] if plan else None) if column in chosen else "-"
                for column, (kind, mode, plan) in enumerate(COLUMNS)
            ]
            count.update(row)
            rows.append([name, *row])
            print(*rows[-1], sep=" | ", flush=True)
    del count["-"]
    return rows, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only kinds whose name contains this text")
    parser.add_argument("--cells", type=int, default=len(COLUMNS), help="columns per kind, others for each kind")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, count = table([name for name in CHANGES if arguments.only in name], arguments.cells)
    print(dict(count))
    if arguments.markdown:
        heads = [f"{kind}, {mode}{plan}" for kind, mode, plan in COLUMNS]
        lines = ["| change | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        total = ", ".join(f"{number} {name}" for name, number in count.most_common())
        arguments.markdown.write_text(
            f"# Changed models\n\n{len(rows)} kinds of change: {total}.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
