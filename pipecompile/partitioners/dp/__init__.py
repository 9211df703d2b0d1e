"""Dynamic programs: the best cut of a linear order of the clusters, and the best cut over all down-sets of the precedence.

A *down-set* (ideal) is a set of clusters that contains all ancestors of its members: what the stages up to a boundary hold.
Where all stages are alike, `alike_stages.py` counts the fewest stages within a target; else `down_sets.py` goes from boundary to boundary.
Open `chain_partition.py` first; `strategy.py` decides which program runs when.
"""
