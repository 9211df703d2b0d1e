"""Bounds: what every cut with a bottleneck below a target has in common, derived without a solver.

Terms. The *target* is a bottleneck that a cut must stay below. The *window* of a cluster is its earliest and latest stage
under a target, as for a station in assembly line balancing. A *separated pair* is two clusters that no stage below the target
can hold together. Open `stage_windows.py` first.
"""
