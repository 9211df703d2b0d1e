"""Writes docs/schedules.md and its charts: every schedule of the catalogue, as its builder's docstring has it, and what it takes.

python docs/schedules.py          a test compares: the page cannot go stale
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from pipecompile.ir import Schedule
from pipecompile.ir.timeline import Timeline
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.show.notebook import timeline_chart
from pipecompile.simulation.simulator import simulate

PAGE, CHARTS = Path(__file__).with_suffix(".md"), Path(__file__).with_suffix("")
DEVICES, MICROBATCHES, SLOW = 4, 8, 0.5

HEAD = f"""# Schedules

A gallery. `F` is a forward, `B` a backward; `I` and `W` are its two halves, the gradients of the inputs and of the weights.
P is the number of devices, M that of micro-batches, v that of stages on a device, k that of slices per micro-batch; tF, tI and tW are the times of one
micro-batch on all stages of a device, tB = tI + tW, T = tF + tB.

All in one table, simulated for P = {DEVICES} and M = {MICROBATCHES} with T = 3 in three equal parts. *Bubble* is the idle part of the step, *peak* the most
micro-batches of which a device holds what their forwards saved, and *slow links* the step when every transfer takes {SLOW}. For other numbers, and for
the costs of your model, look at the report (`pipe.report()`), or let `auto_schedule` search.

A search for the fastest schedule, as `schedule="auto"`, compares those above `sequential`. Of the others, most are no faster in as
much memory, and some recompute or offload, which `checkpoint` and `offload` do for any schedule. `auto_schedule` compares all of whole micro-batches that recompute, offload
and overlap nothing, and without `placement=` it tries the placements that they have: a loop, and to and fro. Its lower bound is for the placements that it tries.

Two actions overlap where a cell of the row is `(0F2;3B0)OVERLAP_F_B`, as torch writes it: a forward and a backward at the same time, each hiding the
communication within the stages of the other, such as the all-to-all of experts. `pc.insert_overlap(schedule)` pairs all neighbours that can overlap.
`simulate(forward_communication=, backward_communication=)` says what of a forward and of a backward is communication: a pair takes the time of
the busier of the two resources, or `overlap=` seconds. In one process and on ranks the two run one after the other, with the same gradients.

Of `seq1f1b`, `seq1f1b-interleaved` and `terapipe` a cell is on a slice of a micro-batch along its sequence: `2F0.1` is the forward of stage 2 on slice 1 of
micro-batch 0. The model has to be causal: a forward reads the keys and values of the slices before it, so on every stage forwards of slices go in order, and backwards
against it. `pc.build_schedule("seq1f1b", 4, 8, n_slices=4)` says how many slices there are (k, here 4). `verify` checks the needs between slices, and `simulate(slice_seconds=, slice_bytes=)` takes
what share of a micro-batch's seconds and bytes each slice has, by default equal ones.

`compile` runs slices in one process, inline or in threads, for decoders whose attention is `F.scaled_dot_product_attention` with `is_causal=True`, or with a causal mask that is made from positions, as that of
`transformers` is. The sequence is dimension 1 of inputs and of the target, and its length is a multiple of the number of slices. The model is recorded a second time on one slice. Comparing the two recordings
shows which dimension of each value has the positions. Each call must compute positions by themselves: linear layers, norms over features, embeddings, elementwise functions, reshapes and transposes that keep
positions in order, learned and rotary positions. All others are refused with the user's line: attention to later positions, BatchNorm, convolutions, means and cumulative sums over positions, dropout, parts kept whole. The
loss has to be one mean or sum over positions, such as cross entropy; each slice weighs as much as it has labels that count. Before the first step, output and loss of a micro-batch on slices are compared with
those on the whole. `pipe(x)`, `evaluate` and steps without gradients run whole micro-batches.

```python
import torch
import torch.nn.functional as F

import pipecompile as pc


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.embed(tokens)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(attention.transpose(1, 2).flatten(2))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


tokens, labels = torch.randint(50, (2, 4, 64))
schedule = pc.build_schedule("seq1f1b", 2, 2, n_slices=4)  # 2 stages, 2 micro-batches of 4 slices
pipe = pc.compile(Decoder(), 2, schedule=schedule, loss_fn=loss_fn, example_args=(tokens,))
print(pipe.step(tokens, target=labels).isfinite())
```

```text printed
tensor(True)
```

Keys and values of a slice are `@s.k` in the program: later slices read them, and their backwards add to the gradients. With `checkpoint="always"` they are all that a slice keeps beside its inputs; the
simulation does not count them there.

```python
import pipecompile as pc

for n_slices in (1, 2, 4):
    schedule = pc.build_schedule("seq1f1b", 4, 8, n_slices=n_slices)
    timeline = pc.simulate(schedule, saved_bytes=1.0)
    print(n_slices, timeline.makespan, max(timeline.peak_memory))

longer = pc.simulate(schedule, slice_seconds=[0.19, 0.23, 0.27, 0.31])  # later slices attend to more keys
print(f"{{longer.makespan:.2f}}")
```

```text printed
1 33.0 4.0
2 28.5 2.5
4 26.25 1.75
31.83
```

Schedules of many micro-batches repeat themselves. `pc.build_periodic("1f1b", 512, 4096)` has prologue, period and epilogue of each device, and its text, JSON and
simulation do not grow with the micro-batches: a row is `0F0,(0F1;0B0)x7+1,0B7`, seven times with micro-batches one later each time, which `Schedule.from_csv` reads
too. `pc.find_period(schedule)` finds the period of any schedule, `pc.simulate_periodic` simulates until the times repeat. `gpipe`, `looped-bfs` and others that run all forwards first have no period.
`pc.lower_periodic` makes the program in the same three parts: a few repetitions are lowered, and `pc.verify` verifies these and shows by induction that it is legal with any
number of them. In its text, what a part repeats is written once, between `(` and `)x511+1`: 511 times, with micro-batches one later each time. `pc.unroll(program)` is what
`lower` would have made. [periodic.md](../benchmarks/results/periodic.md) has the seconds.

```python
import pipecompile as pc

schedule = pc.build_periodic("1f1b", 8, 100_000)
program = pc.lower_periodic(schedule)
pc.verify(program, in_flight=8)
print(repr(program))
print(f"{{pc.simulate_periodic(schedule).makespan:.0f}} s")
```

```text printed
PeriodicProgram(n_stages=8, n_microbatches=100000, n_devices=8, 99993 times 1)
300021 s
```

The charts show the same runs: blue are forwards, orange backwards, yellow `I`, green `W`, violet recomputations; darker is a device's second stage.
"""


def page() -> str:
    """The whole text. Written by docs/schedules.py."""
    parts = [HEAD, "\n".join(_table()), *("\n".join(_section(name)) for name in CATALOGUE)]
    return "\n".join(parts) + "\n\nWritten by `python docs/schedules.py`.\n"


def _table() -> Iterator[str]:
    yield "| schedule | stages on a device | step | bubble | peak | slow links |"
    yield "|---|---|---|---|---|---|"
    for name, entry in CATALOGUE.items():
        schedule = _shown(name)
        chunks = schedule.n_stages // DEVICES
        plain, slow = _run(schedule), _run(schedule, SLOW)
        peak = "" if name == "forward" else f"{max(plain.peak_memory):g}"
        dealt = f"{chunks}" if entry.chunks else f"any, here {chunks}"
        yield f"| [{name}](#{name}) | {dealt} | {plain.makespan:g} | {plain.bubble:.1%} | {peak} | {slow.makespan:g} |"


def _shown(name: str) -> Schedule:
    chunks = CATALOGUE[name].chunks or (1 if name in ("gpipe", "sequential", "terapipe", "forward") else 2)
    return build_schedule(name, chunks * DEVICES, MICROBATCHES, n_devices=DEVICES)


def _run(schedule: Schedule, transfer: float = 0.0) -> Timeline:
    part = schedule.n_devices / schedule.n_stages
    return simulate(schedule, forward=part, input_grad=part, weight_grad=part, transfer=transfer, saved_bytes=part)


def charts() -> dict[str, str]:
    """Per file its SVG."""
    return {f"{name}.svg": timeline_chart(_run(_shown(name))) + "\n" for name in CATALOGUE}


def _section(name: str) -> Iterator[str]:
    """The docstring of the module: drawings are indented, `Bubble:`, `Memory:` and `When:` begin a paragraph of their own."""
    yield f"\n## {name}\n"
    text = importlib.import_module(CATALOGUE[name].build.__module__).__doc__ or ""
    drawing = False
    for line in text.strip().splitlines():
        is_drawn = line.startswith("    ")
        if is_drawn != drawing:
            yield "```text" if is_drawn else "```"
        drawing = is_drawn
        word, colon, rest = line.partition(": ")
        if colon and word in ("Bubble", "Memory", "When"):
            yield f"- **{word}.** {rest[0].upper()}{rest[1:]}"
        else:
            yield line.removeprefix("    ") if is_drawn else line
    if drawing:
        yield "```"
    yield f"\n![{name} for P = {DEVICES}, M = {MICROBATCHES}](schedules/{name}.svg)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CHARTS.mkdir(exist_ok=True)
    for file, chart in charts().items():
        (CHARTS / file).write_text(chart, encoding="utf-8")
