"""Batching: a call of a model as micro-batches, and their outputs as one.

A call is a flat list of leaves (tensors and other values), each with its batch dimension. Open first: `call_inputs.py`
(`FlatInputs`, the call) and `microbatches.py` (`MiniBatch`, its division); `merging.py` puts values together. `batch_dims.py`
decides which dimension is the batch, `sample_lists.py` treats arguments that are lists with one entry per sample, and
`containers.py` makes objects that hold tensors into pytrees. `microbatch_list.py` has micro-batches that the user has made,
`packed_split.py` those of packed sequences, and `block_masks.py` the masks of `flex_attention`.
"""
