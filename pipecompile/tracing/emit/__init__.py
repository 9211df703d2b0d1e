"""Emission of graph nodes for recorded calls.

`value_nodes` maps live tensors to nodes, `call_description` gives opcode and target of a call and the writes that torch does not
declare, `node_writer` appends the node and the switches of grad mode and autocast. At the end,
`graph_module` writes replaced buffers back and assembles the TracedGraph; `region_graphs` writes the code of a graph with regions of
`torch.utils.checkpoint`. Open `node_writer.py` first.
"""
