"""`import deepspeed`: ``table`` and ``helper_names`` say which names there are and what serves each, ``finder`` makes modules of them.

``deepspeed/alias/``: one table from ``deepspeed.*`` names to ours, one of refused names with the reason; ``deepspeed/served/`` holds what
stands behind the names that are no part of an engine. A start-up hook of a few lines adds a finder that answers ``import deepspeed``,
``find_spec`` and ``importlib.metadata`` when no real DeepSpeed is installed; ``HF_ZERO=1`` makes ours win, ``HF_ZERO=0`` turns it off.
"""
