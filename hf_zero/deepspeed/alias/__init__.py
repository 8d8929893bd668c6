"""`import deepspeed`: ``table`` and ``helper_names`` say which names there are and what serves each, ``finder`` makes modules of them."""
