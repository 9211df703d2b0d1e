"""dp: say here what this level is, and nothing else."""
