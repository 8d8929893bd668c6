"""Start ranks: read the environment variables of MPI and Slurm, and build the commands of `hf-zero launch`. Standard library only."""
