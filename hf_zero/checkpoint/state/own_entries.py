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
_LEFT_OUT = "$left_out"  # key of the names of the entries that were not saved
_LARGE = 1 << 16  # elements; tensors up to this size are saved


def own_entries(inner: torch.optim.Optimizer, encoder: Encoder) -> dict[str, Any]:
    """Return the encoded entries by name. Objects, large tensors and tensors of a parameter's size are left out, with a warning: these
    tensors are mostly the states of parameters, of which each rank has its own part and which are saved anyway.
    """
    if type(inner).state_dict is torch.optim.Optimizer.state_dict and not inner._optimizer_state_dict_post_hooks:  # type: ignore[attr-defined]
        return {}
    sizes = {param.numel() for group in inner.param_groups for param in group["params"]}
    found, lost = {}, []
    for name, value in inner.state_dict().items():
        if name in _KNOWN or not isinstance(name, str):
            continue
        try:
            tensors = [leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
            if any(numel in sizes or numel > _LARGE for numel in tensors):
                raise CheckpointError("a large tensor")
            found[name] = encoder.encode(value, f"optimizer.state_dict()[{name!r}]")
        except CheckpointError:
            lost.append(name)
    if lost:
        warn_once(
            f"{type(inner).__name__}.state_dict() has the entry {lost[0]!r}, a large tensor, one of a parameter's size or an object: the "
            "checkpoint has no such entries beside the states of the parameters. Keep a tensor of a parameter in self.state[param]"
        )
        found[_LEFT_OUT] = encoder.encode(lost, _LEFT_OUT)
    return found


def give_entries(inner: torch.optim.Optimizer, entries: Mapping[str, Any]) -> None:
    """Call ``load_state_dict`` of the optimizer's class with ``entries``, without parameters and states; local.

    Raises:
        CheckpointError: The method raises, although no entry was left out of the checkpoint.
    """
    left_out = entries.get(_LEFT_OUT, [])
    given = {name: value for name, value in entries.items() if name != _LEFT_OUT}
    groups = [{**options_of(group), "params": []} for group in inner.param_groups]
    before = attributes_of(inner)
    other = clone(inner, groups, defaultdict(dict))
    try:
        other.load_state_dict({"state": {}, "param_groups": [dict(group) for group in groups], **given})
    except Exception as error:  # a script's method may raise any error
        problem = (
            f"{type(inner).__name__}.load_state_dict() failed for the saved entries {', '.join(given)}: {type(error).__name__}: {error}"
        )
        if not left_out:
            raise CheckpointError(problem) from error
        warn_once(f"{problem}. The checkpoint lacks the entries {', '.join(left_out)}, so all of them keep their present values")
        return
    take_attributes(inner, before, other)
