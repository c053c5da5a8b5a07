"""Every function that can stand in a rewritten graph, and nothing else."""
