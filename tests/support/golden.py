"""Golden texts: `pytest --update-golden` rewrites every expectation with what the code says now; read the diff.

A golden file holds cases. A case is a sentence, what goes in, and what must come out:

    /// A value that nobody reads is freed after it was written.
    <input>
    ---
    <output>
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

CheckGolden = Callable[[Path, Callable[[str], str]], None]


def golden_check(update: bool) -> CheckGolden:
    """`check(path, run)`: every case of the file comes out of `run` as it is written there."""

    def check(path: Path, run: Callable[[str], str]) -> None:
        cases = [_split(case) for case in path.read_text().split("/// ")[1:]]
        assert cases, f"{path} holds no case"
        found = [(title, given, run(given)) for title, given, _ in cases]
        if update:
            path.write_text("\n".join(f"/// {title}\n{given}---\n{output}" for title, given, output in found))
        else:
            assert found == cases

    return check


def _split(case: str) -> tuple[str, str, str]:
    title, _, body = case.partition("\n")
    given, _, expected = body.partition("---\n")
    return title, given, expected.rstrip("\n") + "\n"
