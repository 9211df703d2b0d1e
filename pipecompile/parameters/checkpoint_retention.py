"""The checkpoints of a directory that stay when one is sealed, and those that belong to a run that was abandoned.

    00000200  00000300  00000400       a run; then one that begins again at 100 and saves 150 with keep=2:
    00000150                           sealed just now: it stays, whatever its number is
    00000400/abandoned                 a higher number is of the abandoned run: `latest_checkpoint` passes it over
    00000200  00000300                 removed: the abandoned run counts as older than the present one

Only checkpoints whose files have the sizes in their checksums count. Without `keep` of them nothing is removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipecompile.parameters.checkpoint_damage import CHECKSUMS, CheckpointDamage, check_sizes
from pipecompile.parameters.checkpoint_files import ABANDONED

__all__ = ["abandon_later", "remove_old"]

_NAME = re.compile("[0-9]{8,}")


def abandon_later(sealed: Path) -> None:
    """Mark the checkpoints with higher numbers than `sealed` as those of an abandoned run, and `sealed` as one of the present run.

    The lowest number is marked first: if the process stops between two marks, the highest one is still the latest checkpoint.
    """
    (sealed / ABANDONED).unlink(missing_ok=True)
    for path in reversed(_checkpoints(sealed.parent)):
        if int(path.name) > int(sealed.name):
            (path / ABANDONED).touch()


def remove_old(sealed: Path, keep: int | None) -> None:
    """Remove all checkpoints but `sealed` and the `keep` - 1 newest whole ones. Leave higher numbers without checksums: other programs
    wrote these.

    `.metadata` goes first: what a crash leaves is not a checkpoint.
    """
    if keep is None:
        return
    paths = [path for path in _checkpoints(sealed.parent) if path != sealed]
    others = sorted(filter(_is_whole, paths), key=lambda path: (path / ABANDONED).exists())  # a stable sort
    kept = others[: keep - 1]
    if len(kept) < keep - 1:
        return
    for path in paths:
        if path not in kept and ((path / CHECKSUMS).exists() or int(path.name) < int(sealed.name)):
            (path / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(directory: Path) -> Sequence[Path]:
    """Return the folders of checkpoints in a directory, the highest number first."""
    found = (file.parent for file in directory.glob("*/.metadata") if _NAME.fullmatch(file.parent.name))
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _is_whole(path: Path) -> bool:
    """Return whether a checkpoint was sealed, and each of its files has the size that was written."""
    try:
        check_sizes(path)
    except CheckpointDamage:
        return False
    return True
