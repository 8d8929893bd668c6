"""Integrations with other frameworks; each name loads on first use, so that only the framework in use is imported.

An engine has to behave differently under different libraries. Trainer uses a destroyed engine as if it were prepared when it trains again;
libraries delete older checkpoints while ours is written in the background; metrics are gathered from ranks that share samples; and
``from_pretrained`` must not start training from random weights. No code inspects stack frames to learn the caller (a test counts). Instead,
a few methods of these libraries are wrapped when the module that defines them is imported, and each wrapper records that its method is
running ([Note: callers], ``integrations/callers.py``). If a library no longer has such a method, a warning names the library, its version,
the method and the feature that no longer works. If samples would then be counted several times, making an engine is an error; if the
limit on checkpoints is then unknown, no checkpoint is written in the background. Integrations register their functions with
``core/engine.py`` (``integrations/attach.py``); no package below imports them.

``core/step/accumulation.py`` decides which micro-step is a boundary, for four calling conventions: the caller announces the boundary
before each backward (accelerate 1.15), calls ``step`` after every micro-step and relies on the count (accelerate 1.6, Lightning), steps
the optimizer (Fabric), or uses ``no_sync``. The count is the number of calls of ``step``, as in DeepSpeed: with
``gradient_accumulation_steps`` 2 every second call updates with all gradients since the last update, however many backwards preceded each
call. A loop over accelerate updates in ``optimizer.step()``, so that whatever a script does between ``backward`` and that call counts
([Note: when accelerate steps], ``integrations/accumulate.py``). Settings that both the script and the configuration can give are in
``integrations/script_values.py`` ([Note: the script's value and the configuration's]).
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "ZeroPlugin": "hf_zero.integrations.accelerate_plugin",
    "DummyOptim": "hf_zero.integrations.accelerate_plugin",
    "DummyScheduler": "hf_zero.integrations.accelerate_plugin",
    "ZeroStrategy": "hf_zero.integrations.lightning",
    "FabricZeroStrategy": "hf_zero.integrations.lightning",
    "AveragedWeightsCallback": "hf_zero.integrations.averages",
}

__all__ = [*_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hf_zero.integrations' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
