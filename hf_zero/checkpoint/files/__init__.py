"""Tensor files: written front to back with checksums, found by parameter, read by ranges."""
