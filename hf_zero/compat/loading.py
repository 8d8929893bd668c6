"""``GatheredParameters`` as transformers calls it: the place where a load that found next to nothing is noticed."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from torch import nn

from hf_zero.errors import StateError
from hf_zero.sharding import gathered
from hf_zero.sharding.unit import full_shape

ALLOW_VARIABLE = "HF_ZERO_ALLOW_MISSING_WEIGHTS"
# The step of from_pretrained, in transformers 4 and 5, that initialises what the checkpoint did not have.
_CALLER = "_initialize_missing_keys"
_SHOWN = 5


class GatheredParameters(gathered.GatheredParameters):
    """``hf_zero.zero.GatheredParameters``, which also looks at how much of a model ``from_pretrained`` has found.

    Training weights that are nearly all random is the most costly failure of stage 3, and the loader only warns. When
    more than half of the parameters, by number and by elements, were not in the checkpoint, the load stops here on every rank, before
    the missing ones are gathered. HF_ZERO_ALLOW_MISSING_WEIGHTS=1 lets such a load pass. What is missing is gathered in the order of
    the model, which is the same on every rank.

    Raises:
        StateError: The load above.
    """

    def __init__(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1)
        model = caller.f_locals.get("self") if caller.f_code.co_name == _CALLER else None
        if isinstance(model, nn.Module):
            _require_most_weights(model)
            # transformers 4 passes detached copies, which are nobody's parameters; 5 passes a set, whose order differs between the ranks.
            params = [param for param in model.parameters() if not getattr(param, "_is_hf_initialized", False)]
        super().__init__(params, *args, **kwargs)


def _require_most_weights(model: nn.Module) -> None:
    if os.environ.get(ALLOW_VARIABLE, "0") not in ("0", ""):
        return
    params = {name: param for name, param in model.named_parameters() if not _is_tied(model, name)}
    missing = [name for name, param in params.items() if not getattr(param, "_is_hf_initialized", False)]
    elements = {name: full_shape(param).numel() for name, param in params.items()}
    lost = sum(elements[name] for name in missing)
    if 2 * len(missing) <= len(params) or 2 * lost <= sum(elements.values()):
        return
    source = getattr(getattr(model, "config", None), "name_or_path", None) or "the given weights"
    shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    raise StateError(
        f"from_pretrained({str(source)!r}) into {type(model).__name__}: only {len(params) - len(missing)} of {len(params)} parameters "
        f"are in the checkpoint, and training would start from random numbers. Missing: {shown}. Either the checkpoint belongs to "
        "another architecture, or its names carry a prefix (module., _orig_mod., base_model.), or its tensors were saved empty at "
        f"stage 3 without a gather. To begin with random weights use from_config, or set {ALLOW_VARIABLE}=1"
    )


def _is_tied(model: Any, name: str) -> bool:
    """Whether a parameter gets its values from another one after the load."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is not None:
        return name in tied
    patterns = getattr(model, "_tied_weights_keys", None) or []
    return any(re.search(pattern, name) for pattern in patterns)
