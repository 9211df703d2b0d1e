"""Run the command line as `python -m pipecompile`."""

from __future__ import annotations

from pipecompile.cli import main

if __name__ == "__main__":
    main()
