"""The process: its files, those of others that it reads, its exit status, its secrets, its C library. Standard library only."""
