"""Implement the names of the alias that do not belong to the engine; each module has one topic of DeepSpeed's API."""
