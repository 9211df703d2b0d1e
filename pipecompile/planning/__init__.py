"""Planning: from a traced graph, its costs and the options to a Plan.

Open `planner.py` first: the path for one number of micro-batches and one schedule: problem, cut, draft, plan. `joint_search.py` walks it for
every candidate where the user left the number or the schedule to choose ("auto"), and takes the shortest simulated step.
`cost_table.py` measures, `thread_slowdown.py` how much longer it takes in threads, `solve_cut.py` calls the partitioner, `schedule_choice.py` builds or searches the schedule.
"""
