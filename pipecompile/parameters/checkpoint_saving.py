"""Checkpoints that can be trusted: a directory per step, with the checksums of its files, and a pointer to the last that is whole.

    out/00000010/   __0_0.distcp  __1_0.distcp  .metadata  checksums.json
    out/00000020/   ...
    out/last_good   00000020

The order of writing is files, `.metadata`, `checksums.json`, `last_good`: what a crash leaves is either whole or not pointed to.
The files are those of `torch.distributed.checkpoint`, which other programs read.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from warnings import warn

import msgspec
import torch
import torch.distributed as dist

from pipecompile.errors import InputError, described
from pipecompile.parameters.checkpoint_files import LAST_GOOD
from pipecompile.parameters.checkpoint_retention import abandon_later, remove_old
from pipecompile.parameters.save_attendance import ABSENT, RankMissing, SaveAttendance, noted_save
from pipecompile.parameters.saving_group import Savers, checked_group, saving_group, saving_ranks
from pipecompile.text.input_checks import file_path, whole
from pipecompile.text.progress import task
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.process_groups import device_types, group_of_some, timeout_of
from pipecompile.torch_private.pytree import tree_map_only

__all__ = ["save_checkpoint"]

_CUT_SHORT = ("unexpected pos", "failed writing", "No space left", "File too large", "quota exceeded")
"""Parts of errors of torch, and of the system, about a file that could not be written to its end."""

_SAVER = ThreadPoolExecutor(1, "pipecompile-checkpoint")
"""Writes asynchronous checkpoints one after the other; Python waits for them before it exits."""
_groups: list[tuple[Any, Any, Any]] = []
"""The default group, the group of the ranks that save, and the group of the writing thread. Its own threads must not outlive the interpreter:
they may hold tensors of Python, and the process aborts where such a thread is stopped. So the groups go at the exit, or when a save finds
that they were destroyed.
"""
atexit.register(_groups.clear)

_NUMBERS: Counter[tuple[int, ...]] = Counter()
"""Number of saves of this process, per ranks: these save in the same order."""

_MOST_STEPS = 10**15
"""Steps of a training. The name of a folder has the number."""


def save_checkpoint(
    state: Mapping[str, Any],
    directory: str | Path,
    step: int,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Future[Path]:
    """Save `state` as the checkpoint of `step` in `directory`; on ranks, all call it with their parts. Its result is the path.

    `keep` is the number of whole checkpoints to keep: older ones are removed when the new one is whole, which stays in any case. A
    `step` below those in `directory` is of a run that went back: `latest_checkpoint` returns no higher one any more, and they count as
    the oldest. With `asynchronous`, tensors are copied to the CPU now and written beside the next steps; `result()` waits, and raises
    what the writing raised. For a pipeline on some of the ranks, `process_group=pipe.copies.group`: its ranks alone call it then.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InputError(f"state={shown(state)} is not a dictionary by names", hint='{"model": pipe.state_dict()}')
    if not isinstance(asynchronous, bool):
        raise InputError(f"asynchronous={shown(asynchronous)} is neither True nor False", hint="asynchronous=True")
    kept = None if keep is None else whole("keep", keep)
    path = file_path("directory", directory) / f"{whole('step', step, 0, _MOST_STEPS):08d}"
    group = checked_group(process_group) or saving_group()
    attendance = _attended(group) if dist.is_initialized() else None
    if not asynchronous:
        done: Future[Path] = Future()
        with task(f"saving {path}"), noted_save(str(path)):
            done.set_result(_save(dict(state), path, kept, Savers.present(group), attendance))
        return done
    copy = tree_map_only(torch.Tensor, _copied, dict(state))
    savers = Savers.present(_own_group(path, group, attendance))
    return _SAVER.submit(_told, copy, path, kept, savers, attendance)


def _attended(group: dist.ProcessGroup | None) -> SaveAttendance:
    ranks = tuple(saving_ranks(group))
    _NUMBERS[ranks] += 1
    return SaveAttendance(_NUMBERS[ranks], ranks)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().cpu() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _own_group(path: Path, group: dist.ProcessGroup | None, attendance: SaveAttendance | None) -> Any:
    """Return a process group for the writing thread, so that its messages meet no others; None without ranks."""
    if attendance is None:
        return None
    world = dist.group.WORLD
    assert world is not None
    _groups[:] = [one for one in _groups if one[0] is world]
    if own := next((own for _, of, own in _groups if of is (group or world)), None):
        return own
    try:
        if group is None:
            own = dist.new_group(None, timeout_of(world), backend="gloo")
        else:  # the others take no part
            own = group_of_some(attendance.ranks, timeout_of(world))
    except RuntimeError as error:
        raise _unwritten(path, f"{attendance.missing()}: {error}", RankMissing) from error
    _groups.append((world, group or world, own))
    return own


def _told(state: dict[str, Any], path: Path, *given: Any) -> Path:
    """Save, and warn of a failure at once: a script may never ask for the result."""
    try:
        return _save(state, path, *given)
    except InputError as error:
        warn(f"{error.what}: {error.why or error.where}", stacklevel=2)
        raise


def _save(
    state: dict[str, Any], path: Path, keep: int | None, savers: Savers | None, attendance: SaveAttendance | None
) -> Path:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if savers is None and path.exists():  # of a run that went back: a mixture of two would be damaged
        shutil.rmtree(path)
    try:
        _require(savers)
        _check_alike(path, savers)
        save(state, checkpoint_id=path, process_group=None if savers is None else savers.group, no_dist=savers is None)
        _seal(path, _gathered(path, savers), keep, savers)
    except CheckpointException as error:  # derives from BaseException
        raise _failure(error.failures, path, savers) from error
    except Exception as error:
        if (explained := _explained(error, path, savers, attendance)) is None:
            raise
        try:
            raise explained from error
        finally:
            del explained  # else it refers to itself by this frame, and keeps the process group
    return path


def _failure(failures: Mapping[int, tuple[BaseException, Any]], path: Path, savers: Savers | None) -> BaseException:
    """Return the error for what ranks raised while they wrote, by their places; of this rank itself what ends its script, such as Ctrl-C."""
    own = failures.get(0 if savers is None else savers.number)
    if own is not None and not isinstance(own[0], Exception):
        return own[0]
    texts = {place: described(one) for place, (one, _) in failures.items()}
    where = (
        texts.values() if savers is None else (f"rank {savers.ranks[place]}: {text}" for place, text in texts.items())
    )
    is_short = any(end in text for text in texts.values() for end in _CUT_SHORT)
    room = "; see whether the disk, or a quota, has room for another" if is_short else ""
    return InputError(
        f"the checkpoint {path} cannot be written", where="; ".join(where), hint=f"the one before is as it was{room}"
    )


def _explained(
    error: Exception, path: Path, savers: Savers | None, attendance: SaveAttendance | None
) -> InputError | None:
    """Return the error that says why a save has failed; None for one that says so itself."""
    if isinstance(error, InputError):
        return None
    if savers is not None and savers.are_gone:
        _groups.clear()
        return InputError(
            f"the checkpoint {path} is not written",
            why="the process group was destroyed while it was being written",
            hint="result() of what save_checkpoint(..., asynchronous=True) returned, before dist.destroy_process_group()",
        )
    if not isinstance(error, RuntimeError):
        return None
    if attendance is None:
        return _unwritten(path, str(error))
    return _unwritten(path, f"{attendance.missing()}: {error}", RankMissing)  # a collective of torch


def _require(savers: Savers | None) -> None:
    """Raise RuntimeError if the ranks have no process group any more: torch would save the part of this rank alone."""
    if savers is not None and savers.are_gone:
        raise RuntimeError("the process group has been destroyed")


def _check_alike(path: Path, savers: Savers | None) -> None:
    """Raise InputError, on all ranks, if they save the checkpoints of different steps: none of them would be whole."""
    if savers is None:
        return
    names: list[Any] = [None] * len(savers.ranks)
    dist.all_gather_object(names, path.name, savers.group)
    if len(set(names)) > 1:
        raise InputError(
            "the ranks save the checkpoints of different steps",
            where="; ".join(f"rank {rank}: {int(name)}" for rank, name in zip(savers.ranks, names, strict=True)),
            why="each rank writes its part of one checkpoint",
            hint="save_checkpoint(..., step) with one number on all ranks",
        )


def _unwritten(path: Path, why: str, kind: type[InputError] = InputError) -> InputError:
    hint = "the one before is as it was"
    if ABSENT in why:
        hint += "; for a pipeline on some of the ranks, save_checkpoint(..., process_group=pipe.copies.group)"
    return kind(f"the checkpoint {path} cannot be written", why=why, hint=hint)


def _seal(path: Path, sums: Mapping[str, tuple[int, str]], keep: int | None, savers: Savers | None) -> None:
    """Write, on the first rank, what says that the checkpoint is whole. Raise InputError on all ranks if it cannot."""
    from pipecompile.parameters.checkpoint_damage import CHECKSUMS

    said, cause = [""], None
    _require(savers)
    first = 0 if savers is None else savers.ranks[0]
    if savers is None or savers.rank == first:
        try:
            _write(path / CHECKSUMS, msgspec.json.encode(sums))
            abandon_later(path)
            _write(path.parent / LAST_GOOD, path.name.encode())
            remove_old(path, keep)
        except OSError as error:
            cause, said = error, [str(error) if savers is None else f"rank {first}: {error}"]
    if savers is not None:
        is_on_cpu = savers.group is not None and "cpu" in device_types(savers.group)
        device = torch.device("cpu") if is_on_cpu else None
        dist.broadcast_object_list(said, first, savers.group, device=device)
    if said[0]:
        what = f"the checkpoint {path} cannot be written"
        try:
            raise InputError(what, where=said[0], hint="the one before is as it was") from cause
        finally:
            del cause  # else it refers to itself by this frame, and keeps the process group


def _gathered(path: Path, savers: Savers | None) -> dict[str, tuple[int, str]]:
    """Return the checksums of all files. Each rank reads its own. Raise InputError on all ranks if one cannot."""
    from pipecompile.parameters.checkpoint_damage import checksum_of

    _require(savers)
    number = 0 if savers is None else savers.number
    own: tuple[dict[str, tuple[int, str]], str] = ({}, "")
    try:
        files = [*path.glob(f"__{number}_*.distcp"), *([path / ".metadata"] if number == 0 else [])]
        own = ({file.name: checksum_of(file) for file in files}, "")
    except OSError as error:
        own = ({}, str(error) if savers is None else f"rank {savers.rank}: {error}")
    parts: list[Any] = [own]
    if savers is not None:
        parts = [None] * len(savers.ranks)
        dist.all_gather_object(parts, own, savers.group)
    if faults := [fault for _, fault in parts if fault]:
        raise InputError(f"the checkpoint {path} cannot be read back", where="; ".join(faults))
    return {name: value for part, _ in parts for name, value in part.items()}


def _write(file: Path, content: bytes) -> None:
    """Write a file whole or not at all, also if the machine stops."""
    temporary = file.with_name(f".{file.name}.part")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
