"""Run the command line as `python -m pipecompile`, and as `pipecompile`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `pipecompile` command. Ctrl-C ends it with one line and exit code 130, wherever it comes."""
    try:
        from pipecompile.cli import main as run
        from pipecompile.cli.narrow_encoding import print_what_can_be_encoded

        print_what_can_be_encoded()
        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    except SystemExit as ended:
        if ended.code == 130 and _is_silent(ended):
            sys.stderr.write("interrupted\n")
        raise


def _is_silent(ended: SystemExit) -> bool:
    """Return whether typer ended the command because of Ctrl-C, of which it says nothing.

    `conclude` says so itself, and raises its exit from None.
    """
    return ended.__context__ is not None and isinstance(ended.__context__.__cause__, KeyboardInterrupt)


if __name__ == "__main__":
    main()
