"""Tables of configuration keys: the rows that `hf-zero explain` prints, and the reference page docs/config.md.

`python -m hf_zero.config.table --write docs/config.md` writes the page, and a test fails when it is not current.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hf_zero.config.auto import AUTO_RULES
from hf_zero.config.keys import Key, all_keys
from hf_zero.config.problems import show
from hf_zero.config.schema.fields import asks, is_on
from hf_zero.system.secrets import MASK, hidden_under

NOT_ALLOWED = "file (not allowed)"  # origin of a value that does not fit its key


class Row(NamedTuple):
    """One line of `explain`: a key, its value as JSON text, the value's origin, the key's fate and its effect."""

    key: str
    value: str
    source: str
    fate: str
    effect: str


# -------------------------------------------------------------------------------------------------- rows of one configuration


def rows_of(resolved: dict[str, Any], origin: dict[str, str], everything: bool = False) -> list[Row]:
    """Return the rows of one configuration, in the order of the schema.

    Args:
        resolved: Nested values with canonical names; keys that are absent have their default.
        origin: Dotted key -> source.
        everything: Return all keys, not only those that were set, filled or derived.
    """
    values = dict(_leaves(resolved, ""))
    rows = []
    for path, key in _with_free_keys(values).items():
        if path not in values and path not in origin and not everything:
            continue
        value = values.get(path, key.default)
        left_open = path not in values and path.startswith(("optimizer.params.", "scheduler.params."))
        if key.secret and value:
            value = MASK
        elif key.path != path:  # a key that the user chose: the schema does not describe its value
            value = hidden_under(path.rpartition(".")[2], value)
        source = origin.get(path, "default")
        if source == NOT_ALLOWED:
            shown = "(see the error)"
        else:
            shown = "(default of the class)" if left_open else MASK if value == MASK else show(value)
        rows.append(Row(path, shown, source, *_fate_and_effect(key, value, values)))
    return rows


def without_effect(resolved: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """Return the keys of the file that request another value than the default and have no effect here, in the order of the schema.

    Args:
        resolved: As in ``rows_of``.
        origin: As in ``rows_of``.
    """
    keys, values = all_keys(), dict(_leaves(resolved, ""))
    given = [key for path in values if origin.get(path) == "file" and (key := keys.get(path)) is not None]
    return [key.path for key in given if key.fate == "accepted" and values[key.path] not in (None, key.default)]


def _with_free_keys(values: dict[str, Any]) -> dict[str, Key]:
    """Return every key that holds a single value, by path; a key whose name the user chose follows the last key of its section."""
    keys = {path: key for path, key in all_keys().items() if not key.is_section and not any(mark in path for mark in ("*", "<", "[]"))}
    free: dict[str, list[str]] = {}
    for path in values.keys() - keys.keys():
        free.setdefault(path.partition(".")[0], []).append(path)
    listed: dict[str, Key] = {}
    sections = [path.partition(".")[0] for path in keys]
    for position, (path, key) in enumerate(keys.items()):
        listed[path] = key
        if sections[position] not in sections[position + 1 : position + 2]:
            listed.update({name: _pattern(name) for name in sorted(free.get(sections[position], ()))})
    return listed


def _fate_and_effect(key: Key, value: Any, values: dict[str, Any]) -> tuple[str, str]:
    """Return fate and effect of a key with this value: a refused key that requests nothing is harmless."""
    if key.fate != "refused":
        return key.fate, key.effect
    switch = all_keys().get(key.switch)
    if switch and not switch.is_section and not is_on(values.get(switch.path, switch.default), switch.passes):
        return "accepted", f"not read while `{switch.path}` is {show(values.get(switch.path, switch.default))}"
    if not asks(value, key.default, key.passes):
        return "accepted", "has its default or is off, so it requests nothing"
    return key.fate, key.effect


def _leaves(block: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    keys = all_keys()
    for name, value in block.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value and (here not in keys or keys[here].is_section):
            yield from _leaves(value, here)
        elif not (here in keys and keys[here].is_section):
            yield here, value


def _pattern(path: str) -> Key:
    """Return the entry of the key list for a path under a name that the user chose: the nearest section above it, or its `*` entry."""
    keys, above = all_keys(), path
    while above:
        above = above.rpartition(".")[0]
        for candidate in (f"{above}.*", above):
            if candidate in keys:
                return keys[candidate]
    raise KeyError(path)


# ---------------------------------------------------------------------------------------------------------- reference page

_INTRODUCTION = """# Configuration keys

This page is generated from the schema by `python -m hf_zero.config.table --write docs/config.md`; do not edit it.

A config is a DeepSpeed JSON file (comments and trailing commas are allowed), a dict, JSON text, or JSON text in base64.
Each of the {count} keys has one fate:

| fate | keys | meaning |
|---|---:|---|
| used | {used} | has the effect that is described |
| mapped | {mapped} | an old spelling, read as the key that it names |
| accepted | {accepted} | has no effect here, for the reason given |
| refused | {refused} | stops the run when its value is neither the default nor off |

`hf-zero explain CONFIG` prints the same for one file: every value with its origin, fate and effect.

## Reading rules

- `null` means "not given". Booleans may be `"true"` and `"false"`, whole numbers `2e8` and `"2e8"`, element types `bf16`, `bfloat16`
  or `torch.bfloat16`. `steps_per_print` may be `Infinity`.
- An unknown key that resembles a known one is an error that names the known one, at every level. A key that resembles none is an error
  inside a section and a warning at the top level, where tools may add their own keys. A key with dots at the top level
  (`zero_optimization.reduce_bucket_size`) is no path: it has no effect and is a warning.
- A section that `enabled` switches on has no effect without this key (`"fp16": {{"loss_scale": 0}}`), which is a warning.
- `strict=True`, `--strict` or `HF_ZERO_STRICT=1` make every warning an error.
- All findings are reported together.
- The prefix `stage3_` may be left out. Two spellings of one key in one file are an error.
- `"auto"` takes the value of its source (next table), else the default of the key; a whole section may be `"auto"`.
- Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` any two give the third:
  `train_batch_size` = micro batch x accumulation x number of data-parallel ranks.

## Values of "auto"

Where the last column is "yes", a value in the file must equal its source; differences are reported as by the Trainer.

| key | source | must match |
|---|---|---|
{auto}
"""

_FORMULAS = {
    "zero_optimization.reduce_bucket_size": "hidden_size x hidden_size",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 x hidden_size x hidden_size",
    "zero_optimization.stage3_param_persistence_threshold": "10 x hidden_size",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate, else optimizer.params.lr",
    "scheduler.params.warmup_num_steps": "warmup_num_steps, at least 1",
}


def reference_page() -> str:
    """Return the text of docs/config.md."""
    keys = list(all_keys().values())
    counts = {fate: sum(key.fate == fate for key in keys) for fate in ("used", "mapped", "accepted", "refused")}
    auto = [f"| `{key}` | {_FORMULAS.get(key, rule.label())} | {'yes' if rule.must_match else ''} |" for key, rule in AUTO_RULES.items()]
    auto.insert(1, "| `train_batch_size` | micro batch x accumulation x ranks | yes |")
    parts = [_INTRODUCTION.format(count=len(keys), auto="\n".join(auto), **counts)]
    parts.append(_section_table("Top level", [key for key in keys if "." not in key.path]))
    for name in dict.fromkeys(key.path.partition(".")[0] for key in keys if "." in key.path):
        parts.append(_section_table(f"`{name}`", [key for key in keys if key.path.startswith(f"{name}.")]))
    return "\n".join(parts)


def _section_table(title: str, keys: Sequence[Key]) -> str:
    lines = [f"## {title}\n", "| key | type | default | fate | effect, or reason |", "|---|---|---|---|---|"]
    for _, group in groupby(keys, key=lambda key: key.effect if key.effect == key.text and key.fate == "refused" else key.path):
        key, *others = group
        effect = key.text if key.effect == key.text else f"{key.text}. *{key.fate.capitalize()}:* {key.effect}"
        cells = (
            f"`{key.path}`{_also(key)}" + "".join(f", `{other.path}`" for other in others),
            "" if others else key.type_text.removesuffix(" or null"),
            "" if key.is_section or others else f"`{show(key.default)}`",
            key.fate,
            effect,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _also(key: Key) -> str:
    """Return the other spellings of a key, except those that only leave out `stage3_` (the page has a rule for them)."""
    others = [name for name in key.also if name not in (key.path.rpartition(".")[2].removeprefix("stage3_"),)]
    return f" (also {', '.join(f'`{name}`' for name in others)})" if others else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the reference page, or write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m hf_zero.config.table", description="Reference page of all configuration keys.")
    parser.add_argument("--write", metavar="FILE", help="file to write instead of printing, for example docs/config.md")
    target = parser.parse_args(arguments).write
    if target:
        from hf_zero.system import own_files  # imports torch

        own_files.write_text(Path(target), reference_page())
    else:
        print(reference_page())


if __name__ == "__main__":
    main()
