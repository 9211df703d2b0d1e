"""`python -m pipecompile` is the command line."""

from __future__ import annotations

from pipecompile.cli import main

if __name__ == "__main__":
    main()
