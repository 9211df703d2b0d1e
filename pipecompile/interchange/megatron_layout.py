"""Megatron-LM's pipeline layouts: `Et*3|(tt|)*29m|L`, the layers of every stage.

layout := item*                        stages are parted by |, commas mean nothing
item   := LAYER | "|" | "(" item* ")", each with "*" NUMBER or without
LAYER  := E embedding | t decoder layer | m MTP layer | L loss

Stage i is on rank i modulo the number of ranks. One stage per rank runs 1F1B, more run interleaved 1F1B.
"""

from __future__ import annotations

import re

from pipecompile.errors import ScheduleError
from pipecompile.interchange.pipeline_order import PipelineOrder, order_of_schedule
from pipecompile.schedules import build_schedule

__all__ = ["is_layout", "megatron_order", "parse_layout"]

_LAYOUT = re.compile(r"[EtmL|*()0-9,\s]+")
_TOKEN = re.compile(r"([EtmL|()])|\*([0-9]{1,4})")
_MOST_ITEMS = 100_000


def is_layout(text: str) -> bool:
    """Return whether a text has the letters of a layout, and a stage."""
    return _LAYOUT.fullmatch(text.strip()) is not None and "t" in text


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the layers of each stage: `Et|tt|L` gives ("Et", "tt", "L"). Raise ScheduleError with the place of a mistake."""
    stack: list[list[str]] = [[]]
    position, compact = 0, re.sub(r"[,\s]", "", text)
    while position < len(compact):
        token = _TOKEN.match(compact, position)
        if token is None:
            raise _mistake(compact, position, "E, t, m, L, |, ( ) and *NUMBER are known")
        if token[2] is not None:
            _repeat(stack[-1], int(token[2]), compact, position)
        elif token[1] == "(":
            stack.append([])
        elif token[1] == ")":
            if len(stack) == 1:
                raise _mistake(compact, position, "no ( is open")
            group = "".join(stack.pop())
            stack[-1].append(group)
        else:
            stack[-1].append(token[1])
        position = token.end()
    if len(stack) > 1:
        raise _mistake(compact, len(compact), "a ( is open")
    return tuple("".join(stack[0]).split("|"))


def _repeat(items: list[str], times: int, text: str, position: int) -> None:
    if not items:
        raise _mistake(text, position, "there is nothing before it to repeat")
    if times < 1 or len(items[-1]) * times > _MOST_ITEMS:
        raise _mistake(text, position, f"a number from 1 on, and {_MOST_ITEMS:,} layers at most")
    items[-1] *= times


def _mistake(text: str, position: int, why: str) -> ScheduleError:
    return ScheduleError(
        f"{text!r} is not a layout", where=f"character {position + 1}", why=why, hint="Et*3|(tt|)*29m|L"
    )


def megatron_order(layout: str, n_ranks: int | None = None, n_microbatches: int | None = None) -> PipelineOrder:
    """Return the order that Megatron runs for a layout. A stage takes as long as it has layers t and m.

    `n_ranks` is the pipeline-parallel size, by default the number of stages; `n_microbatches` is twice as many by default.
    """
    stages = parse_layout(layout)
    ranks = len(stages) if n_ranks is None else n_ranks
    count = 2 * ranks if n_microbatches is None else n_microbatches
    if len(stages) % ranks:
        raise ScheduleError(
            f"{len(stages)} stages do not go evenly onto {ranks} ranks", where=layout,
            why="stage i is on rank i modulo the number of ranks", hint=f"ranks={len(stages)}",
        )  # fmt: skip
    name = "1f1b" if len(stages) == ranks else "interleaved"
    built = build_schedule(name, len(stages), count, n_devices=ranks)
    weights = tuple(float(stage.count("t") + stage.count("m")) for stage in stages)
    text = f"megatron:{'|'.join(stages)};ranks={ranks};microbatches={count}"
    return order_of_schedule(built, text, "Megatron-LM", weights)
