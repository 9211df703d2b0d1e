"""Integer programs: the optimum and its proof, where bounds and dynamic programs leave a gap.

Terms. A *step variable* is 1 iff a cluster is in stage s or before. *Boundary* s lies after stage s. An *anchor* is a cluster
whose stage alone is modelled. `target_search.py` decides what runs when: open it first, then `formulation.py` (the program of
all stages), `one_stage.py` (the relaxation to one stage) and `step_variables.py`. `solver_backend.py` wraps HiGHS and CBC.
"""
