"""The parts that several benchmarks share: rank processes, models and loops, tables, pictures."""
