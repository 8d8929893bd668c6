"""Implement DeepSpeed's interface with the engine of ``hf_zero.core``.

Where to look:

- ``initialize``, ``engine``: ``deepspeed.initialize`` and the engine that it returns. The engine's methods come from ``getters``
  (read-only), ``requests`` (with side effects), ``timers`` and ``offload_handle``; ``zero_init``, ``param_attributes`` and ``safe_values``
  handle parameters.
- ``alias``: `import deepspeed`, all its names, and the names that are refused.
- ``served``: other names that scripts import, by topic: devices, processes and groups, configuration, optimizers, logs, small helpers.
- ``launcher``: the `deepspeed` command.
"""

from __future__ import annotations

from hf_zero.deepspeed.alias.finder import install_as_deepspeed

__all__ = ["install_as_deepspeed"]
