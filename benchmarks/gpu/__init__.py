"""All measurements and tests that need a GPU, as parts with time limits: `python -m benchmarks.gpu`."""
