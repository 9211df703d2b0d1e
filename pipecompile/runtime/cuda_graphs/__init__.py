"""cuda_graphs: say here what this level is, and nothing else."""
