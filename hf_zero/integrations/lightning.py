"""Define strategies for Lightning: ``Trainer(strategy=ZeroStrategy(stage=3))`` and ``Fabric(strategy=FabricZeroStrategy(stage=3))``.

Both are subclasses of Lightning's DeepSpeed strategies that also run on CPUs. Lightning's support for DeepSpeed (precision, checkpoints as
folders) therefore applies to them, and with the methods that ``lightning_steps.py`` replaces they accumulate and clip as under DDP.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from hf_zero.deepspeed import install_as_deepspeed
from hf_zero.deepspeed.alias import finder
from hf_zero.errors import ConfigError, StateError
from hf_zero.launch.placement import export_placement

__all__ = ["FabricZeroStrategy", "ZeroStrategy"]

_DEVICES = ("cpu", "nvme")


def _deepspeed_strategy(kind: str, old_package: str) -> Any:
    """Return Lightning's DeepSpeed strategy of ``kind`` ("pytorch" or "fabric"), from the package that the script uses.

    Raises:
        ImportError: Lightning is not installed.
        StateError: A real DeepSpeed is imported already, and Lightning would use it instead of hf_zero.
    """
    install_as_deepspeed()
    if not finder.alias_is_active():
        raise StateError("a real DeepSpeed is imported already and Lightning would use it: set HF_ZERO=1 before Python starts")
    name = f"lightning.{kind}"
    if "lightning" not in sys.modules and old_package in sys.modules:
        name = old_package
    try:
        return importlib.import_module(f"{name}.strategies.deepspeed").DeepSpeedStrategy
    except ModuleNotFoundError as error:
        raise ImportError(f"hf_zero.integrations.lightning needs Lightning: pip install lightning ({error})") from error


_Trainer: Any = _deepspeed_strategy("pytorch", "pytorch_lightning")
_Fabric: Any = _deepspeed_strategy("fabric", "lightning_fabric")


class _ZeroArguments:
    """Constructor of both strategies: turns their arguments into Lightning's arguments. A base class in front of Lightning's class."""

    config: dict[str, Any]

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: bool | str | Mapping[str, Any] = False,
        offload_parameters: bool | str | Mapping[str, Any] = False,
        nvme_path: str | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        export_placement()  # Lightning looks at RANK and LOCAL_RANK when its Trainer is made
        offload = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        arguments, sections = _arguments(type(self).__name__, stage, offload, nvme_path, config)
        if config is None and not options.get("zero_optimization", True) and (stage or sections):
            raise ConfigError(f"{type(self).__name__}: zero_optimization=False turns ZeRO off; remove it, or remove stage and offload")
        super().__init__(**arguments, **options)
        if config is None:
            self._tidy(sections)

    def _tidy(self, sections: Mapping[str, dict[str, Any]]) -> None:
        """Add the offload sections to the configuration that Lightning made, and remove "aio" and "activation_checkpointing" if unused."""
        if "zero_optimization" in self.config:  # absent with zero_optimization=False
            self.config["zero_optimization"].update(sections)
        if all(section["device"] != "nvme" for section in sections.values()):
            self.config.pop("aio", None)
        if not any(self.config.get("activation_checkpointing", {}).values()):
            self.config.pop("activation_checkpointing", None)


class ZeroStrategy(_ZeroArguments, _Trainer):
    """Train with ZeRO under Lightning's ``Trainer``, on GPUs and on CPUs.

    Args:
        stage: ZeRO stage 1, 2 or 3.
        offload_optimizer: Device that stores optimizer state between steps: False, True (``"cpu"``), ``"cpu"``, ``"nvme"`` or a complete
            ``offload_optimizer`` section.
        offload_parameters: Device that stores parameters between uses (stage 3); the same values, or an ``offload_param`` section.
        nvme_path: Folder for state and parameters on nvme.
        config: DeepSpeed configuration instead of the arguments above: a dict or the path of a JSON file. Accumulation, clipping
            and precision still come from the ``Trainer``.
        **options: Further arguments of Lightning's ``DeepSpeedStrategy`` (``load_full_weights``, ``cpu_checkpointing``, ...).

    Raises:
        ConfigError: An argument has a value outside its range, or is given together with ``config``.
    """

    strategy_name = "hf_zero"

    def setup_environment(self) -> None:
        """Create the process group on any device; skip the check for CUDA of Lightning's DeepSpeed strategy.

        Raises:
            ConfigError: ``spike_action`` is rewind, which needs snapshots, and Lightning's Trainer takes none.
        """
        section = self.config.get("hf_zero")
        if isinstance(section, Mapping) and str(section.get("spike_action")).lower() == "rewind":
            raise ConfigError("hf_zero.spike_action is rewind, but Lightning's Trainer takes no snapshots to restore; use skip")
        super(_Trainer, self).setup_environment()

    def setup_distributed(self) -> None:
        """Set up the ranks like Lightning's DeepSpeed strategy, but on the CPU without its check of device indices."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        _reset_seed(_Trainer)
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class FabricZeroStrategy(_ZeroArguments, _Fabric):
    """Train with ZeRO under Lightning's ``Fabric``, on GPUs and on CPUs; the arguments are those of ``ZeroStrategy``.

    A loop accumulates and clips as under Fabric's other strategies: ``fabric.no_backward_sync``, ``fabric.clip_gradients``. It may instead
    set ``gradient_accumulation_steps`` and ``gradient_clipping`` in ``config``: the engine then counts micro-steps, and the script calls
    ``optimizer.step()`` after each one. Without ``gradient_clipping`` nothing is clipped.
    """

    def setup_environment(self) -> None:
        """Create the process group on any device; skip the check for CUDA of Lightning's DeepSpeed strategy."""
        super(_Fabric, self).setup_environment()

    def _setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super()._setup_distributed()
            return
        _reset_seed(_Fabric)
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized: bool = True


def _reset_seed(stock: type) -> None:
    """Seed this process again, as Lightning does after a start; ``stock`` is Lightning's strategy class, from the package in use."""
    package = stock.__module__.partition(".strategies.")[0]
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}.get(package, package)
    importlib.import_module(f"{fabric}.utilities.seed").reset_seed()


def _arguments(
    what: str,
    stage: int | None,
    offload: Mapping[str, bool | str | Mapping[str, Any]],
    nvme_path: str | None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the equivalent arguments of Lightning's class, and the offload sections to add to the configuration that it makes."""
    if config is not None:
        beside = [name for name, value in {"stage": stage, **offload, "nvme_path": nvme_path}.items() if value not in (None, False)]
        if beside:
            raise ConfigError(f"{what}: {', '.join(beside)} would be ignored, because config= is given; set the value in the configuration")
        return {"config": dict(config) if isinstance(config, Mapping) else os.fspath(config)}, {}
    if stage not in (None, 0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"{what}: stage is {stage!r}; allowed are 0, 1, 2, 3")
    sections = {
        section: _offload_section(f"{what}: {name}", offload[name], nvme_path)
        for name, section in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param"))
        if offload[name]
    }
    return {"stage": 2 if stage is None else stage}, sections


def _offload_section(name: str, value: bool | str | Mapping[str, Any], nvme_path: str | None) -> dict[str, Any]:
    section: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"device": "cpu" if value is True else value}
    if section.get("device") not in _DEVICES:
        raise ConfigError(f"{name} is {section.get('device')!r}; allowed are False, True and {', '.join(map(repr, _DEVICES))}")
    if section["device"] == "nvme":
        section.setdefault("nvme_path", nvme_path)
        if not section["nvme_path"]:
            raise ConfigError(f'{name} is "nvme", but no folder is set; give nvme_path="/path"')
    return section
