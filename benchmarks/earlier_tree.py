"""A work tree of an earlier revision of this repository, for benchmarks that run both versions in turns."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "earlier_tree"]

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def earlier_tree(revision: str) -> Iterator[Path]:
    """Check out a revision into a temporary folder, yield the folder, and remove it at the end."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "earlier"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
