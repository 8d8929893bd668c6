"""What stands behind the names of the alias and is no part of an engine; each module serves one topic of DeepSpeed's own."""
