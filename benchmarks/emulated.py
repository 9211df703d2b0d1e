"""Streams proven without a GPU, the long run: emulated devices under random timings, and with every damage in turn.

    python benchmarks/emulated.py [--timings 20] [--models tiny] [--markdown benchmarks/results/emulated.md]

A timing is an order in which streams and host go on (tests/support/stepped.py), drawn at random. Each must give the loss and the
gradients of one thread, bit for bit. A wait or event that is missing or moved is *seen* when the step differs with the launch that
was waited for after all that can go on without it, and with it who reads what is given back; so is a FREE that comes too early. A
FREE that is missing makes no wrong number: it is seen when the verifier refuses the program, as it does before anything runs. The
others are listed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.graph import backward_split as divided
from pipecompile.ir import Op, Program
from pipecompile.runtime.stream_events import Place, launches
from pipecompile.schedules import CATALOGUE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.eager import square_loss
from tests.support.emulated import EmulatedExecutable
from tests.support.launch_mutants import free_earlier, is_legal, mutants, with_row
from tests.support.models import ZOO, deterministic
from tests.support.stepped import SteppedStreams

STAGES, COUNT = 4, 4
LOOPED = ("interleaved", "interleaved-zb", "looped-bfs", "hanayo", "llama3", "po-half", "po-full")
"""Schedules with any number of stages per device: they get two."""

MODES = ("never", "except_last", "always", "offload")
"""Name what a forward keeps for its backward: all, its inputs but for the last micro-batch, its inputs, or all, of which the host has
what waits.
"""

Outcome = list[torch.Tensor | None]


class Net(nn.Module):
    """A chain with a skip over all stages, small enough to be run a thousand times; with `drop`, each layer draws."""

    def __init__(self, depth: int, drop: float = 0.0) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth)), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            h = layer(h.tanh())
            h = F.dropout(h, self.drop) if self.drop else h
        return h + first


def models() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    torch.manual_seed(0)
    for name in ("resnet18", "unet"):
        yield name, deterministic(ZOO[name][0]()).eval(), {"x": torch.randn(8, 3, 32, 32)}
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    yield "net", Net(8), {"x": torch.randn(8, 8)}
    yield "tiny", Net(4), {"x": torch.randn(8, 8)}
    yield "drops", Net(8, 0.3), {"x": torch.randn(8, 8)}
    yield "gpt2", transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(40, (8, 8))}


def loss_of(output: Any) -> torch.Tensor:
    return square_loss(output if isinstance(output, torch.Tensor) else output.logits)


def outcome(pipe: pc.Pipeline, inputs: dict[str, Any]) -> Outcome:
    pipe.model.zero_grad()
    loss = pipe.step(**inputs)
    return [loss, *(None if p.grad is None else p.grad.clone() for p in pipe.model.parameters())]


def same(one: Outcome, other: Outcome) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


def piped(
    model: nn.Module, inputs: dict[str, Any], schedule: str, checkpoint: str, dispatch: str = "inline"
) -> pc.Pipeline:
    chunks = CATALOGUE[schedule].chunks if schedule in CATALOGUE else 1
    devices = ["cpu"] * (STAGES // (chunks or (2 if schedule in LOOPED else 1)))
    return pc.compile(
        copy.deepcopy(model), STAGES, example_kwargs=inputs, n_microbatches=COUNT, loss_fn=loss_of, cost="analytic",
        dispatch=dispatch, devices=devices, schedule=schedule, tied="apart",
        **({"offload": True} if checkpoint == "offload" else {"checkpoint": checkpoint}),  # type: ignore[arg-type]
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Timings of one schedule in one mode: those that were equal, all, and how many different orders the devices worked in."""

    model: str
    schedule: str
    checkpoint: str
    equal: int
    of: int
    orders: int


def timings(name: str, model: nn.Module, inputs: dict[str, Any], number: int, schedules: list[str]) -> Iterator[Row]:
    """Run half of `number` timings launched by one thread, and half by a thread per device."""
    for schedule in schedules:
        for checkpoint in MODES if schedule != "auto" else MODES[:-1]:
            try:
                pipe, streams = piped(model, inputs, schedule, checkpoint), SteppedStreams()
            except pc.ScheduleError as error:
                print(f"{schedule} {checkpoint}: refused: {error.args[0]:.100}", flush=True)
                continue
            expected = outcome(pipe, inputs)
            try:
                made = EmulatedExecutable(pipe, COUNT, streams=streams)
            except pc.ScheduleError as error:
                print(f"{schedule} {checkpoint}: refused: {error.args[0]:.100}", flush=True)
                continue
            equal, seeds = 0, range(max(1, number // 2))
            if getattr(model, "drop", 0.0):
                expected = drawn_at_once(pipe, inputs, streams)
            for pipe._dispatcher.choice in ("inline", "threads"):
                for seed in seeds:
                    streams.reseed(seed)
                    streams.generators = {}
                    equal += same(outcome(pipe, inputs), expected)
            made.n_runs -= bool(getattr(model, "drop", 0.0))
            assert (made.n_runs, made.n_threaded_runs) == (2 * len(seeds), len(seeds) * (len(pipe.devices) > 1))
            yield Row(name, schedule, checkpoint, equal, 2 * len(seeds), len(streams.orders))


def drawn_at_once(pipe: pc.Pipeline, inputs: dict[str, Any], streams: SteppedStreams) -> Outcome:
    """The step on devices that have no launch to come when the host launches the next, each with a generator of its own."""
    streams.host, streams.generators = 1e9, {}
    return outcome(pipe, inputs)


def damaged(name: str, model: nn.Module, inputs: dict[str, Any], schedule: str) -> Iterator[Harm]:
    """Waits and events removed and moved, and FREEs moved before their last reader and removed: one at a time, all of them."""
    pipe = piped(model, inputs, schedule, "never")
    expected = outcome(pipe, inputs)
    made = EmulatedExecutable(pipe, COUNT, streams=SteppedStreams())
    program, planned = made.program, launches(made.program, made.streams.apart)
    tried, missed = Counter[str](), defaultdict[str, Counter[str]](Counter)
    implied, unseen = Counter[str](), Counter[str]()
    for mutant in mutants(program, planned):
        tried[mutant.kind] += 1
        if mutant.is_implied(program):
            implied[mutant.kind] += 1
            continue
        made.suffer(mutant)
        if survives(pipe, inputs, expected):
            missed[mutant.kind].update({what_of(program, place, mutant.missed) for place in mutant.at})
            unseen[mutant.kind] += 1
    assert made.n_runs == tried.total() - implied.total()
    made.streams.close()
    for d, i in ((d, i) for d, row in enumerate(program.rows) for i, at in enumerate(row) if at.op is Op.FREE):
        made = EmulatedExecutable(pipe, COUNT, free_earlier(d, i), SteppedStreams())
        outlives = {"FREE before its last reader": survives(pipe, inputs, expected)} if made.was_harmed else {}
        assert made.n_runs == len(outlives)
        made.streams.close()
        for kind, is_unseen in (
            outlives
            | {"FREE removed": is_legal(with_row(program, d, (*program.rows[d][:i], *program.rows[d][i + 1 :])))}
        ).items():
            tried[kind] += 1
            if is_unseen:
                missed[kind].update([str(program.rows[d][i].reads[0].value)])
                unseen[kind] += 1
    made = EmulatedExecutable(pipe, COUNT, streams=SteppedStreams())
    assert survives(pipe, inputs, expected), "undamaged, the step is right, after all these"
    made.streams.close()
    for kind in tried:
        yield Harm(name, schedule, kind, tried[kind], implied[kind], unseen[kind], missed[kind])


@dataclass(frozen=True)
class Harm:
    """One kind of damage to one program. `implied`: the rest of the plan still orders the launches. `what` were those that nobody saw."""

    model: str
    schedule: str
    kind: str
    tried: int
    implied: int
    missed: int
    what: Counter[str]


def survives(pipe: pc.Pipeline, inputs: dict[str, Any], expected: Outcome) -> bool:
    try:
        return same(outcome(pipe, inputs), expected)
    except Exception:  # a launch failed, or something was not freed
        return False


def what_of(program: Program, place: Place, missed: Place) -> str:
    here, there = program.rows[place[0]][place[1]], program.rows[missed[0]][missed[1]]
    kind = "gradient" if (*here.reads, *here.writes)[0].value.consumer is not None else "activation"
    awaited = there.op.value if there.op is not Op.COMPUTE else "compute"
    return f"{here.op.value} of a{'n' * (kind == 'activation')} {kind} after {awaited}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--timings", type=int, default=20, help="of each schedule in each mode of checkpointing; 0 for none"
    )
    parser.add_argument("--models", nargs="+", default=["resnet18", "unet", "net", "tiny", "drops", "gpt2"])
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=[*(name for name, entry in CATALOGUE.items() if not entry.has_slices and name != "forward"), "auto"],
    )
    parser.add_argument("--no-damage", action="store_true", help="leave out the damages")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    divided.MIN_WEIGHT_FLOPS["cpu"] = 0.0
    Backend.memories = lambda _, devices, placement: range(len(devices))  # type: ignore[assignment,method-assign,misc]  # noqa: ARG005
    start, rows, harms = time.perf_counter(), list[Row](), list[Harm]()
    command = f"`python benchmarks/emulated.py {' '.join(sys.argv[1:])}`, torch {torch.__version__}"
    for name, model, inputs in (each for each in models() if each[0] in options.models):
        for row in timings(name, model, inputs, options.timings, options.schedules) if options.timings else ():
            print(row, f"{time.perf_counter() - start:.0f} s", flush=True)
            rows.append(row)
            if options.markdown:  # an interruption leaves what there is
                options.markdown.write_text(report(rows, harms, f"{command}, {time.perf_counter() - start:.0f} s."))
        for schedule in () if options.no_damage else ("1f1b", "zbv"):
            for harm in damaged(name, model, inputs, schedule):
                harms.append(harm)
                print(harm, flush=True)
    text = report(rows, harms, f"{command}, {time.perf_counter() - start:.0f} s.")
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


def report(rows: list[Row], harms: list[Harm], command: str) -> str:
    lines = ["# Emulated devices", "", command, ""]
    total, equal = sum(row.of for row in rows), sum(row.equal for row in rows)
    lines += [
        "Timings that gave the loss and gradients of one thread, bit for bit; half of them launched by one thread, half by one per",
        f"device; in brackets, the different orders in which the devices worked. Together {equal:,} of {total:,}.",
        "",
    ]
    lines += [f"| model | schedule | {' | '.join(MODES)} |", "|---|---|" + "---|" * len(MODES)]
    cells = {(row.model, row.schedule, row.checkpoint): f"{row.equal}/{row.of} ({row.orders})" for row in rows}
    for name, schedule in dict.fromkeys((row.model, row.schedule) for row in rows):
        modes = " | ".join(cells.get((name, schedule, mode), "-") for mode in MODES)
        lines.append(f"| {name} | {schedule} | {modes} |")
    lines += ["", "Damages, one at a time, with what was waited for after all that can go on without it:", ""]
    lines += [
        "| model | schedule | damage | tried | implied | not seen | these were |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    for harm in harms:
        what = ", ".join(f"{count} {kind}" for kind, count in harm.what.items()) or "-"
        lines.append(
            f"| {harm.model} | {harm.schedule} | {harm.kind} | {harm.tried} | {harm.implied} | {harm.missed} | {what} |"
        )
    lines += ["", "Implied: other waits order the launches as before, by a longer way; such damage is harmless and not run. A FREE after its copy is",
              "not needed while autograd holds the same memory. An event counts as seen when one of those who wait for it does.", ""]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
