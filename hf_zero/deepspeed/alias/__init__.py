"""Answer `import deepspeed`: ``table`` and ``helper_names`` map its names to objects of hf_zero, ``finder`` makes modules of them.

One table maps ``deepspeed.*`` names to ours, another lists refused names with the reason. ``deepspeed/served/`` has the implementations of
names outside of an engine. A start-up hook of a few lines adds a finder that answers ``import deepspeed``, ``find_spec`` and
``importlib.metadata`` if no real DeepSpeed is installed. ``HF_ZERO=1`` prefers hf_zero to a real DeepSpeed, ``HF_ZERO=0`` turns the alias
off.
"""
