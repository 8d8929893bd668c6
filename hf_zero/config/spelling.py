"""Translate a raw dictionary to today's key names; report unknown keys with the nearest known one."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hf_zero.config.keys import default_of, extra_of, nested_of, spellings_of
from hf_zero.config.problems import Problems, nearest, show
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import ConfigError

_TRUE_TEXTS, _FALSE_TEXTS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WITH_UNIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kKmMgGtT])(i?)[bB]?|[bB](?:ytes)?)")
_CORE_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "data_types")
"""Sections to search for an unknown key that may be at the wrong level."""
_COMPUTED_KEYS = ("zero_optimization.stage3_prefetch_bucket_size",)
"""Numbers of elements that published examples compute as 0.9 * hidden_size ** 2; a fraction in them has no meaning."""
_OF_TRL = frozenset(
    f"zero_optimization.{name}" for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)
"""Keys that TRL always adds together to the configuration of a model that it only runs (a reference, a reward). They have no reader."""
_PUBLISHED_MISSPELLINGS = {
    "grandient_accumulation_steps": "gradient_accumulation_steps",  # DeepSpeed's own files for pipelines
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",  # files that EVA-CLIP writes, and the next two, at its stage 3
    "stage3_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "stage3_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}
"""Misspelled and misplaced keys in published files, which DeepSpeed ignores, and the keys that they mean; others are errors."""
_MOST_UNKNOWN = 100
"""Maximum number of unknown keys: each is compared with all known keys, which takes time."""


class Speller:
    """Translator of one raw configuration to canonical key names.

    Args:
        problems: Collector that gets unknown keys, keys given under two names, and values that should be blocks.

    Attributes:
        origin: Dotted canonical path -> "file", or "file (<the spelling in the file>)".
    """

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self._unknown = 0
        self.origin: dict[str, str] = {}

    def canonical(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested dictionaries with canonical names. Nulls are dropped (they mean "not given"); "auto" is kept."""
        if raw.keys() >= _OF_TRL:
            raw = {key: value for key, value in raw.items() if key not in _OF_TRL}
        return self._section(self._aio_at_the_top(raw), ZeroConfig, "", None)

    def _aio_at_the_top(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `raw` with an `aio` block moved out of `zero_optimization`, where a published example has it."""
        zero = raw.get("zero_optimization")
        if not isinstance(zero, Mapping) or "aio" not in zero:
            return raw
        here = "zero_optimization.aio"
        if raw.get("aio") is not None:
            self.problems.error(here, "and `aio` are two places of the same block; keep `aio`")
        else:
            self.problems.warn(here, "is read as the block `aio`, which belongs beside `zero_optimization`; move it there")
        return {"aio": zero["aio"], **raw, "zero_optimization": {key: value for key, value in zero.items() if key != "aio"}}

    def _section(self, raw: Mapping[str, Any], section: type[Section], path: str, kind: Any) -> dict[str, Any]:
        """Return one block with canonical names. `kind` is the `type` beside a `params` block, which decides which further keys the block
        may have.
        """
        data: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        names = spellings_of(section)
        for key, value in raw.items():
            here = f"{path}.{key}" if path else str(key)
            name = names.get(key)
            if name is None:
                if self._may_stay(key, section, path, kind):
                    data[key], self.origin[here] = value, "file"
                continue
            if value is None:
                continue
            if name in spelled:
                self.problems.error(here, f"and `{spelled[name]}` are two names of the same key; keep one")
                continue
            spelled[name] = here
            if extra_of(section.model_fields[name])["fate"] == "mapped":
                name, value = self._old_switch(section, name, value, here, raw)
                if value is None:
                    continue
            target = f"{path}.{name}" if path else name
            found = self._value(value, section, name, target, raw.get("type"))
            if found is not None:
                data[name] = found
                self.origin.setdefault(target, "file" if here == target else f"file ({here})")
        return data

    def _old_switch(self, section: type[Section], name: str, value: Any, here: str, raw: Mapping[str, Any]) -> tuple[str, Any]:
        """Translate an old switch such as `cpu_offload: true` to the name of the block that replaced it and its content, None if it is
        off.
        """
        block_path = extra_of(section.model_fields[name])["into"].partition(":")[0].rpartition(".")[0]
        block = block_path.rpartition(".")[2]
        on = False if isinstance(value, str) and value == "auto" else boolean_of(value)
        if on is None:
            self.problems.error(here, f"is {show(value)}; allowed: true or false")
        if on and raw.get(block) is not None:
            self.problems.error(here, f"is the old form of `{block_path}`, which is given too; keep only `{block_path}`")
            return block, None
        if on:
            self.origin[f"{block_path}.device"] = f"file ({here})"
        return block, {"device": "cpu"} if on else None

    def _value(self, value: Any, section: type[Section], name: str, path: str, kind: Any) -> Any:
        """Return a field's value with the sections below it translated; None when it switches the section off."""
        nested = nested_of(section, name)
        if path in _COMPUTED_KEYS and isinstance(value, float) and math.isfinite(value) and not value.is_integer():
            self.origin[path] = f"file (rounded down from {value})"
            return math.floor(value)
        if nested is None or (isinstance(value, str) and value == "auto"):
            return value
        if nested.kind == "list":
            if isinstance(value, (list, tuple)):
                return [self._block(item, nested.section, f"{path}[{i}]", kind) for i, item in enumerate(value)]
            self.problems.error(path, f"is {show(value)}; allowed: a list of blocks [{{...}}, ...]")
            return None
        if nested.kind == "map" and isinstance(value, Mapping):
            return {key: self._block(item, nested.section, f"{path}.{key}", kind) for key, item in value.items()}
        if extra_of(section.model_fields[name]).get("bool_ok") and boolean_of(value) is not None:
            if not boolean_of(value):
                return None
            if name == "zero_optimization":
                self.origin[f"{path}.stage"] = f"file ({path}: true)"
                return {"stage": 1}
            return {}
        return self._block(value, nested.section, path, kind)

    def _block(self, value: Any, section: type[Section], path: str, kind: Any) -> dict[str, Any] | None:
        if isinstance(value, Mapping):
            self._warn_if_off(value, section, path)
            return self._section(value, section, path, kind)
        example = _example(value, section)
        self.problems.error(path, f"is {show(value)}; allowed: a block {{...}}{f', such as {example}' if example else ''}")
        return None

    def _warn_if_off(self, raw: Mapping[str, Any], section: type[Section], path: str) -> None:
        """Warn of a section with keys, but without the key `enabled`, which is false by default, or another key that switches it on."""
        switch = section.model_fields.get("enabled")
        if not raw or "." in path or switch is None or default_of(switch) is not False or extra_of(switch)["fate"] != "used":
            return
        if not any(spellings_of(section).get(key) in ("enabled", section.switch or "enabled") for key in raw):
            text = "is missing, and its default is false, so the section has no effect: set it to true, or remove the section"
            self.problems.warn(f"{path}.enabled", text)

    def _may_stay(self, key: Any, section: type[Section], path: str, kind: Any) -> bool:
        """Return whether an unknown key may stay, which only sections with free keys allow; report the key otherwise."""
        self._unknown += 1
        if self._unknown > _MOST_UNKNOWN:
            raise ConfigError(f"More than {_MOST_UNKNOWN} keys are unknown, {show(key)} among them: this is no DeepSpeed config")
        if not isinstance(key, str):
            self.problems.error(f"{path}.{key}" if path else str(key), f"is a {type(key).__name__}; keys of a configuration are strings")
            return False
        if not path:
            self._unknown_at_top(key)
            return False
        names = dict.fromkeys(spellings_of(section))
        arguments = constructor_arguments(path, kind)
        if arguments is not None:
            if key in arguments:
                return True
            names.update(dict.fromkeys(arguments))
        guess = nearest(key, names)
        if guess is None and section.free_keys and arguments is None:
            return True
        elsewhere = None if guess else nearest_elsewhere(key)
        if guess or elsewhere:
            hint = f"did you mean `{f'{path}.{guess}' if guess else elsewhere}`?"
        else:
            hint = f"`{path}` takes {_some(list(names))}"
        self.problems.error(f"{path}.{key}", f"is unknown; {hint}")
        return False

    def _unknown_at_top(self, key: str) -> None:
        if "." in key:
            block, _, name = key.rpartition(".")
            self.problems.warn(key, f'is ignored: dots in a key form no path. To set the value, write {{"{block}": {{"{name}": ...}}}}')
            return
        guess = nearest(key, spellings_of(ZeroConfig)) or nearest_elsewhere(key)
        meant = _PUBLISHED_MISSPELLINGS.get(key)
        if meant is not None:
            self.problems.warn(
                key,
                f"is ignored, as by DeepSpeed: published configurations write it for `{meant}`; to set that, write its whole path",
            )
        elif guess:
            self.problems.error(key, f"is unknown; did you mean `{guess}`?")
        else:
            self.problems.warn(key, "is ignored: it resembles no known key, so it counts as a key of your script")


def boolean_of(value: Any) -> bool | None:
    """Return True or False for booleans and their usual texts; None for other values."""
    text = str(value).strip().lower() if isinstance(value, (bool, int, str)) else ""
    return True if text in _TRUE_TEXTS else False if text in _FALSE_TEXTS else None


def _example(value: Any, section: type[Section]) -> str:
    """Return the JSON block that a single ``value`` in its place abbreviates (`"bf16": true`), or ""."""
    kinds: tuple[tuple[str, type], ...] = (("enabled", bool), ("stage", int), ("type", str), ("device", str))
    for name, kind in kinds:
        if name in section.model_fields and type(value) is kind:
            return json.dumps({name: value})
    return '{"device": "cpu"}' if "device" in section.model_fields and value is True else ""


def without_unit(value: Any) -> int | None:
    """Return the number that a size with a unit means (``"1GB"``, ``"4 KiB"``, ``"500M"``); None for other values."""
    found = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def nearest_elsewhere(key: str) -> str | None:
    """Return the dotted path of a key in a core section that `key` resembles, for keys written at the wrong level; None if there is none.

    Only names of two words or more are compared: `type`, `enabled` or `stage` are common names of users' own keys.
    """
    paths: dict[str, str] = {}
    for section_name in _CORE_SECTIONS:
        nested = nested_of(ZeroConfig, section_name)
        for name in spellings_of(nested.section) if nested else ():
            if "_" in name and len(name) >= 8:
                paths.setdefault(name, f"{section_name}.{name}")
    guess = nearest(key, paths)
    return paths[guess] if guess else None


# ------------------------------------------------------------------------------------------- arguments of torch classes


def constructor_arguments(path: str, kind: Any) -> frozenset[str] | None:
    """Return the argument names of the torch class that gets the `params` block at `path`.

    Returns:
        None if the block is not for a torch class: then it may have any key that resembles no known one.
    """
    if path not in ("optimizer.params", "scheduler.params") or not isinstance(kind, str):
        return None
    found = torch_class(path.partition(".")[0], kind)
    return None if found is None else frozenset(list(inspect.signature(found).parameters)[1:])


def torch_class(section: str, name: str) -> type | None:
    """Return the class of torch.optim ("optimizer") or torch.optim.lr_scheduler ("scheduler") with this name, in any letter case; or
    None.
    """
    import torch  # only here, because reading a config otherwise does not need torch

    module = torch.optim if section == "optimizer" else torch.optim.lr_scheduler
    base = torch.optim.Optimizer if section == "optimizer" else torch.optim.lr_scheduler.LRScheduler
    for known, value in vars(module).items():
        if known.lower() == name.lower() and inspect.isclass(value) and issubclass(value, base) and value is not base:
            return value
    return None
