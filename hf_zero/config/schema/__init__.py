"""The configuration schema: every key of the file, with type, default, help and fate. It starts at ``root``."""
