"""Emission of graph nodes for recorded calls.

`value_nodes` maps live tensors to nodes, `node_target` gives opcode and target of a call, `effects` the writes that torch does
not declare, `node_writer` appends the node, `ambient_regions` the switches of grad mode and autocast. At the end,
`buffer_writeback` writes replaced buffers and `graph_module` assembles the TracedGraph. Open `node_writer.py` first.
"""
