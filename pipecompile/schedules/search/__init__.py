"""Schedule search for given costs and memory: `auto_schedule`.

    workload            costs and routes of one micro-batch, as numbers per stage
    makespan_bound      lower bounds on the step, where a search can stop: cell_seconds, release_lags, action_times
    catalogue_candidates ──► schedules of the catalogue to compare with
    priority_rules      candidate rules ──► list_scheduling: one rule ──► one schedule
    list_search         rules within a budget, memory correction, hill climbing
    critical_swaps      tabu search on the critical path of the best schedule
    exact               CP-SAT (exact_solver) on exact_model proves the bound and improves the schedule (exact_incumbent); ticks are its times
    deadline            the time limit
    evaluate            step time and memory of any candidate

Open `auto.py` first. All searches are deterministic, unless a time limit ends them.
"""
