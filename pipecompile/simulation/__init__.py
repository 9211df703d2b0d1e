"""What would happen when: a program as tasks and messages, run_to_end under costs.

costs      seconds and bytes, as users give them, checked
tasks      what the walk sees: numbers, in lists          from_schedule, from_program make them
walk       every start and end, and what each waited for
memory     the bytes on every device over time
critical   the chain of waits that makes the step as long as it is
"""

from __future__ import annotations
