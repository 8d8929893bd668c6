"""Starting ranks: what MPI and Slurm say in the environment, and the commands of `hf-zero launch`. Standard library only."""
