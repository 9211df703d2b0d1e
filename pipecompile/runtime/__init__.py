"""runtime: binds a lowered program to stages and devices, and runs it.

    Program ──interpreter──► Code: one Python function per instruction ──dispatch──► one thread, or a thread per device

`cells/` computes a stage on a micro-batch, forward and backward; `cuda_graphs/` captures and replays it; `transport` moves
values, `streams` and `stream_events` run copies beside compute, `executable` keeps what all runs of a program share.

The level has no text form of its own: `str(program)` is what runs, instruction by instruction. Its order was proved to
be free of deadlocks by `verifiers/`, before anything here sees it. Open `interpreter.py` first, then `cells/forward_backward.py`.
"""
