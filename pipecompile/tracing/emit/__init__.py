"""Emission of graph nodes for recorded calls.

`value_nodes` maps live tensors to nodes, `node_target` gives opcode and target of a call, `effects` the writes that torch does
not declare, `node_writer` appends the node, `ambient_regions` the switches of grad mode and autocast. At the end,
`graph_module` writes replaced buffers back and assembles the TracedGraph. Open `node_writer.py` first.
"""
