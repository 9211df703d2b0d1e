"""Run the command line as `python -m pipecompile`, and as `pipecompile`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `pipecompile` command. Ctrl-C while its modules are imported ends it with one line, too."""
    try:
        from pipecompile.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
