"""Programs that measure and write the tables of docs/parity.md: the matrix, the architectures, the loaded types."""
