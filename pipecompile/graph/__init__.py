"""Analysis of traced graphs and passes on them, between the recording and the costs.

`colocation` computes the nodes that must share a stage, `prepare` notes them in the graph and verifies it, `stages` cuts the graph
into one module per stage with a route for each value, `region_parts` divides regions that the user checkpoints, and
`output_merging` decides how the outputs of micro-batches become one output. `cut_constraints` and `cut_transfer` translate names
and cuts to the nodes of a graph; `fingerprint` identifies a graph in plan files. `cross_sample`, `risks` and `explanation` report
on a recording. `backward_split` divides an autograd graph into the gradients of inputs and of weights.

The level itself is `tracing.traced_graph`, with its text form and parser; its verifier is `verifiers.traced_graph`. Open
`stages.py` first.
"""
