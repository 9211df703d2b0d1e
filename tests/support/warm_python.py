"""A process that has imported torch and pipecompile, and runs scripts of tests in forks of itself: none of them waits for imports.

    test      run("tests.distributed.mistakes", FOLDER)
    server      fork: main() of the module, with these words as sys.argv[1:]; its output goes to files
    test      the output

The server itself computes nothing: a process that has run autograd must not fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]

__all__ = ["WarmPython"]


class WarmPython:
    """The process, which starts at the first run and ends with the context."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.communicate(timeout=60)

    def run(self, module: str, *words: str, timeout: float = 600.0, **variables: str) -> str:
        """Return what main() of a module prints, given the words and environment variables; raise AssertionError if it fails."""
        with tempfile.TemporaryDirectory() as folder:
            request = {"module": module, "words": words, "timeout": timeout, "variables": variables, "folder": folder}
            code = self._answer(json.dumps(request))
            out, error = ((Path(folder) / name).read_text(encoding="utf-8") for name in ("out", "error"))
        assert code == 0, f"{module} {words}: {code}\n{error[-3000:]}"
        return out

    def _answer(self, request: str) -> Any:
        if self._server is None:
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            self._server = subprocess.Popen([sys.executable, __file__], env=environment, text=True,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(request + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


# -- the server -------------------------------------------------------------------------------------------------------


def main() -> None:
    import pytest
    import torch

    from tests.distributed.faults import FORK, warm
    from tests.support.quick_compiles import compile_quickly

    torch.set_num_threads(1)
    compile_quickly(pytest.MonkeyPatch())
    warm()
    for line in sys.stdin:
        request = json.loads(line)
        process = FORK.Process(target=_script, args=(request,))
        process.start()
        process.join(request["timeout"])
        code = "it ran for too long" if process.is_alive() else process.exitcode
        process.kill()
        process.join()
        print(json.dumps(code), flush=True)


def _script(request: dict[str, Any]) -> None:
    folder = Path(request["folder"])
    for name, number in (("out", 1), ("error", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= request["variables"]
    sys.argv[1:] = request["words"]
    import_module(request["module"]).main()


if __name__ == "__main__":
    main()
