"""The plan that a model brings along (transformers' ``tp_plan``), checked line by line against the data flow.

Such plans are patterns with the names of styles ("model.layers.*.mlp.down_proj": "rowwise"). Many name layers that cannot be split so,
or leave out a norm whose gradient has to be added up, which goes wrong silently. So a line decides only between ways to split that are
exact: how a layer is split that is split by itself. What the data flow splits together stays, and the table says whether they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from hf_zero.tensor_parallel.plan import COLUMN, GATHERED, ROW, SCATTERED, VOCABULARY, ModulePlan, TpPlan, starred
from hf_zero.tensor_parallel.solve import is_linear

SOURCE = "tp_plan"
_LOCAL = {COLUMN: GATHERED, ROW: SCATTERED}


def own_styles(model: nn.Module) -> dict[str, str]:
    """Styles by starred path, as the model and its configuration give them; empty where there are none."""
    for name in ("tp_plan", "_tp_plan"):
        found = getattr(model, name, None)
        if isinstance(found, Mapping) and found:
            return {str(pattern): str(style) for pattern, style in found.items()}
    return {}


def named_layers(model: nn.Module) -> dict[str, str]:
    """Linear layers that the model's own plan, or its configuration's, names, with how they are split; patterns as of file names."""
    styles = own_styles(model) or getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    linear = [path for path, module in model.named_modules() if is_linear(type(module))]
    found = {path: next((family(style) for pattern, style in styles.items() if fnmatchcase(path, pattern)), "") for path in linear}
    return {path: how for path, how in found.items() if how}


def family(style: str) -> str:
    """What a style does to a linear or embedding layer; empty for styles of other modules."""
    if style.startswith("embedding"):
        return VOCABULARY if "rowwise" in style else ""
    return COLUMN if "colwise" in style else ROW if "rowwise" in style else ""


def preferences(plan: TpPlan, styles: Mapping[str, str]) -> dict[str, str]:
    """Layers that ``plan`` splits by themselves in another way than the model's own plan, with that way."""
    found = {}
    for path, entry in plan.modules.items():
        wanted = _LOCAL.get(family(styles.get(starred(path), "")))
        if wanted is not None and entry.split in _LOCAL.values() and entry.split != wanted:
            found[path] = wanted
    return found


def note_source(plan: TpPlan, styles: Mapping[str, str]) -> None:
    """Says in the table of ``plan`` which rows the model's own plan gives, and what it says of the others."""
    for path, entry in plan.modules.items():
        style = styles.get(starred(path))
        if style is None or entry.source != "inferred":
            continue
        if _agree(entry, style):
            entry.source = SOURCE
        elif family(style):
            entry.reason += f"; {SOURCE} says {style}"
    if any(entry.source == SOURCE for entry in plan.modules.values()) and plan.source == "inferred":
        plan.source = SOURCE


def _agree(entry: ModulePlan, style: str) -> bool:
    gathered = "gather" in style or style.endswith("_rep")
    return entry.split == {
        COLUMN: GATHERED if gathered else COLUMN,
        ROW: SCATTERED if "split_input" in style else ROW,
        VOCABULARY: VOCABULARY,
    }.get(family(style))
