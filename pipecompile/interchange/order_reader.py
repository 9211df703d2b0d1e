"""`read_schedule`: a file or a name of another framework's pipeline becomes a `PipelineOrder`.

    schedule.csv                               torch.distributed.pipelining
    nodes.txt                                  sail-sg: lists of ScheduledNode(...)
    layout.txt, megatron:Et*3|(tt|)*29m|L      Megatron-LM
    deepspeed:TrainSchedule                    DeepSpeed

A name may end in counts: `deepspeed:TrainSchedule;ranks=4;microbatches=8`.
"""

from __future__ import annotations

from os import PathLike

from pipecompile.errors import InputError, ScheduleError
from pipecompile.interchange.deepspeed_schedule import deepspeed_order
from pipecompile.interchange.megatron_layout import is_layout, megatron_order
from pipecompile.interchange.pipeline_order import PipelineOrder
from pipecompile.interchange.torch_csv import parse_torch_csv
from pipecompile.interchange.zero_bubble_nodes import parse_nodes
from pipecompile.text.input_checks import file_path, known_names, whole, without_mark
from pipecompile.text.text_file import load_text

__all__ = ["is_named_order", "read_order", "read_schedule"]

_FRAMEWORKS = ("megatron", "deepspeed")


_SOURCES = 'the path of a .csv file that torch wrote, "deepspeed:TrainSchedule", "megatron:Et*3|(tt|)*5t|L"'
"""Examples of what can be read."""


def read_schedule(
    source: str | PathLike[str], *, n_ranks: int | None = None, n_microbatches: int | None = None
) -> PipelineOrder:
    """Return the pipeline of a file of torch.distributed.pipelining, Megatron-LM, DeepSpeed or sail-sg, with all of its cells.

    `source` is a path, or a name such as `deepspeed:TrainSchedule` and `megatron:Et*3|(tt|)*29m|L`. `n_ranks` is the number of
    ranks of a name or layout, and `n_microbatches` the number of micro-batches; other files have these themselves. Raise
    ScheduleError with the place of what cannot be read. `check_order` finds what is wrong,
    `repair_order` mends it.
    """
    if isinstance(source, str) and is_named_order(source):
        return read_order(source, "", n_ranks, n_microbatches)
    path = file_path("source", source)
    return read_order(load_text(path, "pipeline", ScheduleError, _SOURCES), path.stem, n_ranks, n_microbatches)


def is_named_order(text: str) -> bool:
    """Return whether a text names a pipeline of a framework, and no file."""
    return text.partition(":")[0] in _FRAMEWORKS and ":" in text


def read_order(text: str, name: str, n_ranks: int | None = None, n_microbatches: int | None = None) -> PipelineOrder:
    """Return the order of the text of a file, in any form. Raise ScheduleError, or InputError for a wrong count."""
    text = without_mark(text)
    body, counts = _counts(text, n_ranks, n_microbatches)
    if body.startswith("deepspeed:"):
        return deepspeed_order(body.removeprefix("deepspeed:").strip(), *counts)
    if body.startswith("megatron:") or is_layout(body):
        return megatron_order(body.removeprefix("megatron:"), *counts)
    if body.startswith("program:"):
        hint = "pipecompile show program.txt, or pc.verify"
        raise ScheduleError("this is a program of pipecompile, and no pipeline of another framework", hint=hint)
    if n_ranks is not None or n_microbatches is not None:
        raise InputError("the file has its ranks and micro-batches itself", hint="n_ranks and n_microbatches left out")
    return parse_nodes(text, name) if "ScheduledNode(" in text else parse_torch_csv(text, name)


def _counts(text: str, n_ranks: int | None, n_microbatches: int | None) -> tuple[str, tuple[int | None, int | None]]:
    """Return a name without its counts, and the counts: those passed, else those of the name."""
    body, *settings = text.strip().split(";") if is_named_order(text.strip()) else [text.strip()]
    values: dict[str, int | None] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        known_names("setting", [key.strip()], ("ranks", "microbatches"))
        values[key.strip()] = whole(key.strip(), int(value) if value.strip().isdecimal() and len(value) < 20 else value)
    for key, count in (("ranks", n_ranks), ("microbatches", n_microbatches)):
        if count is not None:
            values[key] = whole(f"n_{key}", count)
    return body, (values.get("ranks"), values.get("microbatches"))
