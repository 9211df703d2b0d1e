"""Simulation of schedules and programs under a cost model.

costs             seconds and bytes, as users pass them, checked
task_graph        input of the walk: tasks and messages as numbers in lists; from_schedule, from_program build it
input_copies      copies of inputs from the host; host_copies of what is offloaded
host_launches     times at which the host launches tasks, if that takes time
event_walk        start and end of every task and message, and what each waited for
array_walk        the same of a periodic schedule, by arrays; steady_state until its times recur
contention_walk   the same where compute is slower beside copies
memory_curve      bytes on every device over time
critical_path     chain of waits that determines the makespan
forecast          a whole training step: reductions, optimizer, jitter; calibration has its costs from a measured step
advice            stages and links whose improvement shortens the step most

Open `simulator.py` first: `simulate` returns an `ir.timeline.Timeline`.
"""

from __future__ import annotations
