"""The process, its files and its C library."""
