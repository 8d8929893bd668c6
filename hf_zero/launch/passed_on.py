"""Which variables the ranks on other hosts get. Values go through the environment only: any user of a host can read command lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.system.text_file import read_text_file

# Variables that ranks on other hosts get, by the beginnings of their names.
PREFIXES = ("ACCELERATE_", "CUDA_DEVICE", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_", "WANDB_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def names_passed_on(environ: Mapping[str, str]) -> list[str]:
    """Names of the user's own variables that other hosts get, in the order of ``environ``."""
    return [name for name in environ if name.startswith(PREFIXES) and _NAME.fullmatch(name)]


def read_environment_files(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``.deepspeed_env`` in the home folder and here, which wins; accelerate writes what it wants passed on there.

    Raises:
        ConfigError: A file cannot be read or a line is no NAME=VALUE; names file and line, and shows nothing of its content.
    """
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    values: dict[str, str] = {}
    for path in dict.fromkeys((Path(os.path.expanduser("~"), name), Path(name))):
        if path.is_file():
            values.update(_read(path))
    return values


def _read(path: Path) -> dict[str, str]:
    values = {}
    for number, line in enumerate(read_text_file(path, "file of variables").split("\n"), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        key, found, value = content.partition("=")
        if not found or not _NAME.fullmatch(key.strip()) or "\0" in value:
            raise ConfigError(f"{path}:{number}: the line is no variable; expected NAME=VALUE, the name of letters, digits and _")
        values[key.strip()] = value.strip()
    return values
