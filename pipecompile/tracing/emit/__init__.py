"""How what is heard becomes a graph: values and their nodes, the spelling of calls, regions, outputs."""
