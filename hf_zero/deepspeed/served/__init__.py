"""Implementations behind the names of the alias, outside of the engine; each module serves one topic of DeepSpeed's own."""
