"""cuda_graphs: stages captured as CUDA graphs once, and replayed instead of launched kernel by kernel.

`stage_graphs` decides per stage, slot and kind of inputs whether a graph may be used; `replay` is a captured stage as one
operation of autograd; `weight_gradients` has the sums that its backward adds to; `capture` is CUDA's capturing, which the tests emulate on a CPU. Open `stage_graphs.py` first.
"""
