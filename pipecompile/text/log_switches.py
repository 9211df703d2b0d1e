"""`PIPECOMPILE_LOGS`: levels of the loggers below `pipecompile`, and where their lines go.

    PIPECOMPILE_LOGS="+partition,schedule"      partition: debug, schedule: info
    PIPECOMPILE_LOGS="all,-run"                 all: info, run: errors alone

`trace` logs recordings, `partition` costs and the solver, `schedule` searches and the lowering, `run` moves of parameters and binding,
`show` files. The lines go to stderr, unless the program has handlers of its own.
"""

from __future__ import annotations

import logging
import os
from difflib import get_close_matches

from pipecompile.errors import InputError

__all__ = ["NAMES", "VARIABLE", "set_levels"]

VARIABLE = "PIPECOMPILE_LOGS"
NAMES = ("all", "trace", "partition", "schedule", "run", "show")

_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def set_levels(text: str | None = None) -> None:
    """Set the levels that `text` names, by default that of the environment variable. Raise InputError for an unknown name."""
    words = (os.environ.get(VARIABLE, "") if text is None else text).split(",")
    for word in filter(None, (word.strip() for word in words)):
        name = word.lstrip("+-")
        if name not in NAMES or len(word) - len(name) > 1:
            near = get_close_matches(name, NAMES, n=1, cutoff=0.3) or NAMES[:1]
            raise InputError(
                f"{VARIABLE} names {word!r}",
                why=f"known are {', '.join(NAMES)}, with + or - before",
                hint=f'{VARIABLE}="+{near[0]}"',
            )
        logger = logging.getLogger("pipecompile" if name == "all" else f"pipecompile.{name}")
        logger.setLevel(_LEVELS.get(word[0], logging.INFO))
        _add_handler()


def _add_handler() -> None:
    root = logging.getLogger("pipecompile")
    if not any(isinstance(handler, _Stderr) for handler in root.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)


class _Stderr(logging.Handler):
    """Writes to the stderr of the moment, if the program has not set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        import sys

        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")
