"""List the configuration keys of an installed DeepSpeed that hf_zero's schema does not know.

    python -m tools.config_census /path/to/venv/bin/python

The Python of the other environment imports its DeepSpeed (``DS_ACCELERATOR=cpu`` makes that possible without a device). It prints the
fields of the pydantic configuration classes, and the keys that modules of constants define with a default. A key counts as known if the
schema has a key of that name, older spellings included, in any section: sections have different names in the two, so only names are
compared. The exit status is 1 if keys are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator

from hf_zero.config.keys import nested_of, spellings_of
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig

# Modules whose keys do not belong to a training configuration, each with the reason.
LEFT_OUT = {
    "deepspeed.inference": "inference engines",
    "deepspeed.module_inject": "kernel injection of inference engines",
    "deepspeed.autotuning": "the tuner, which is refused whole",
    "deepspeed.compression": "compression, which is refused whole",
    "deepspeed.model_implementations": "inference engines",
    "deepspeed.launcher": "the launcher's arguments",
    "deepspeed.elasticity.constants": "names of environment variables and messages",
    "deepspeed.runtime.data_pipeline": "data efficiency, which is refused whole",
}

_LISTING = """
import importlib, json, os, pkgutil, sys
import deepspeed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
failed, keys = [], []
root = os.path.dirname(deepspeed.__file__)
names = []
for folder, _, files in os.walk(root):
    place = os.path.relpath(folder, os.path.dirname(root)).replace(os.sep, ".")
    names += [place + "." + f[:-3] for f in files if f.endswith(".py") and ("config" in f or "constants" in f)]
for name in sorted(names):
    try:
        module = importlib.import_module(name)
    except Exception as error:
        failed.append([name, repr(error)[:200]])
        continue
    if name.endswith("constants"):
        for label, value in vars(module).items():
            if label.isupper() and isinstance(value, str) and hasattr(module, label + "_DEFAULT") and value.isidentifier():
                keys.append([name, value, repr(getattr(module, label + "_DEFAULT"))[:60]])
def walk(kind):
    for sub in kind.__subclasses__():
        yield sub
        yield from walk(sub)
for kind in walk(DeepSpeedConfigModel):
    for field, info in kind.model_fields.items():
        keys.append([kind.__module__, info.alias or field, repr(info.default)[:60]])
print("CENSUS " + json.dumps({"version": deepspeed.__version__, "keys": keys, "failed": failed}))
"""


def known_names(section: type[Section] = ZeroConfig) -> Iterator[str]:
    """Yield the names of all keys of the schema, in any section, with their other spellings."""
    yield from spellings_of(section)
    for name in section.model_fields:
        yield name
        nested = nested_of(section, name)
        if nested is not None:
            yield from known_names(nested.section)


def missing_keys(listed: list[list[str]]) -> list[tuple[str, str, str]]:
    """Return (module, key, default) of the keys that the schema does not know, each key of a module once."""
    known = {name.lower() for name in known_names()}
    found = {
        (module, key, default)
        for module, key, default in listed
        if key.lower() not in known and not any(module.startswith(left) for left in LEFT_OUT)
    }
    return sorted(found)


def listing(python: str) -> dict[str, object]:
    """Return the version, the keys and the failed imports of the DeepSpeed in the environment of ``python``.

    Raises:
        RuntimeError: The Python cannot be run, or prints no keys.
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_ZERO": "0"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-c", _LISTING], capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("CENSUS ")]
    if not lines:
        raise RuntimeError(f"{python} found no keys: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(lines[-1].removeprefix("CENSUS "))
    return found


def main() -> int:
    """Print the missing keys; return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python of an environment with DeepSpeed")
    found = listing(parser.parse_args().python)
    missing = missing_keys(found["keys"])  # type: ignore[arg-type]
    for module, key, default in missing:
        print(f"{key:45} default {default:20} {module}")
    for name, error in found["failed"]:  # type: ignore[attr-defined]
        print(f"not imported: {name}: {error}")
    print(f"DeepSpeed {found['version']}: {len(missing)} of {len(found['keys'])} keys are not in the schema")  # type: ignore[arg-type]
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
