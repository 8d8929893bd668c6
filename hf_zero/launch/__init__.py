"""Start ranks: read the variables of MPI and Slurm, build commands of `hf-zero launch`, run its nodes over ssh. Standard library only."""
