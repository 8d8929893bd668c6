"""Save the entries that a script's optimizer adds to its ``state_dict`` (``{**super().state_dict(), "count": self.count}``), and give them
to its ``load_state_dict``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_zero.checkpoint.format.values import Encoder
from hf_zero.core.optimizer.clones import attributes_of, clone, options_of, take_attributes
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once

KEY = "$state_dict"
"""Key of the entries among the states under texts, where no optimizer has a name that begins like this."""
_KNOWN = frozenset({"state", "param_groups"})


def own_entries(inner: torch.optim.Optimizer, encoder: Encoder) -> dict[str, Any]:
    """Return the encoded entries by name. Large tensors and objects are left out, with a warning; they are mostly the states of
    parameters, which are saved anyway.
    """
    if type(inner).state_dict is torch.optim.Optimizer.state_dict and not inner._optimizer_state_dict_post_hooks:  # type: ignore[attr-defined]
        return {}
    found, lost = {}, []
    for name, value in inner.state_dict().items():
        if name in _KNOWN or not isinstance(name, str):
            continue
        try:
            if any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
                raise CheckpointError("a large tensor")
            found[name] = encoder.encode(value, f"optimizer.state_dict()[{name!r}]")
        except CheckpointError:
            lost.append(name)
    if lost:
        warn_once(
            f"{type(inner).__name__}.state_dict() has the entry {lost[0]!r}, a tensor or an object: the checkpoint has no such entries "
            "beside the states of the parameters. Keep a tensor of a parameter in self.state[param]"
        )
    return found


def give_entries(inner: torch.optim.Optimizer, entries: Mapping[str, Any]) -> None:
    """Call ``load_state_dict`` of the optimizer's class with ``entries``, without parameters and states; local.

    Raises:
        CheckpointError: The method raises.
    """
    groups = [{**options_of(group), "params": []} for group in inner.param_groups]
    before = attributes_of(inner)
    other = clone(inner, groups, defaultdict(dict))
    try:
        other.load_state_dict({"state": {}, "param_groups": [dict(group) for group in groups], **entries})
    except Exception as error:  # a script's method may raise any error
        raise CheckpointError(
            f"{type(inner).__name__}.load_state_dict() failed for the saved entries {', '.join(entries)}: {type(error).__name__}: {error}"
        ) from error
    take_attributes(inner, before, other)
