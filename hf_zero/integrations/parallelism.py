"""Combine accelerate's ParallelismConfig with a DeepSpeed plugin: one mesh for the configuration, the loaders and the engine.

[Note: ParallelismConfig] If a DeepSpeed plugin is in use, accelerate reads only ``sp_size`` of a ParallelismConfig: it ignores the other
sizes, or fails. So as soon as an ``AcceleratorState`` exists, the sizes from all sources are combined into one mesh (``config.mesh``). They
are then written to the places that accelerate and Trainer read: ``tensor_parallel.autotp_size`` of the plugin's configuration, by which
these libraries distribute samples and count tokens, and the sizes that the ParallelismConfig left out. ``initialize`` takes the other sizes
from this module.

[Note: cp with sp] accelerate refuses a ParallelismConfig with both ``cp_size`` and ``sp_size`` when the object is made, before it is known
whether a DeepSpeed plugin is in use. So here the object is made, and the state of an Accelerator without such a plugin refuses it.
accelerate cuts batches where ``sp_size`` is more than 1, but under context parallelism the engine cuts them; so the ParallelismConfig then
says ``cp_size`` = cp x sp and ``sp_size`` = 1. A ParallelismConfig that is used again after a reset gets its own sizes back first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hf_zero.assembly.mesh import fits_own_node
from hf_zero.comm.process_groups import device_mesh
from hf_zero.config.mesh import AXES, Claim, Mesh, claims_of_config, claims_of_environment, claims_of_sizes, requested_ranks, solve
from hf_zero.core.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations import callers, early_checks, methods
from hf_zero.observe import warn_once
from hf_zero.sequence_parallel.forward import bound_forwards
from hf_zero.sequence_parallel.layer import DistributedAttention

_MESH = "_hf_zero_mesh"  # in accelerate's state, which a reset clears
_GIVEN = "_hf_zero_given"  # in a ParallelismConfig: its sizes and its sp_handler as the script gave them, and the sizes written since
_USE = "ACCELERATE_USE_PARALLELISM_CONFIG"


def start_accelerator_state(method: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``AcceleratorState.__init__``: also build the mesh in the first state with a DeepSpeed plugin, which is collective.

    A precision that only the plugin was given (fp8, which no JSON has) becomes the Accelerator's.

    Raises:
        ConfigError: The sources contradict each other or do not fit the ranks.
        UnsupportedError: A source requests a combination of axes that is not supported.
    """
    given = kwargs.get("parallelism_config")
    if given is not None and not type(state)._shared_state:
        _restore(given)
    wished = getattr(kwargs.get("deepspeed_plugin"), "asks_for", None)
    if wished is not None and kwargs.get("mixed_precision") is None:
        kwargs["mixed_precision"] = wished
    method(state, *args, **kwargs)
    if not _is_ours(state):
        _say_if_left_out(state, kwargs.get("deepspeed_plugin"))
        _refuse_both(state, given)
        return
    if _MESH in vars(state):
        _require_same(state, given)
        return
    try:
        mesh = _solve(state)
        _tell(state, mesh)
    except BaseException:
        type(state)._reset_state()  # so that a notebook can try again
        raise
    setattr(state, _MESH, mesh)


def claims_of_accelerate() -> list[Claim]:
    """Return the claims of the process' ParallelismConfig about the mesh; empty before an Accelerator with a DeepSpeed plugin is made."""
    module = sys.modules.get("accelerate.state")
    state = vars(module)["AcceleratorState"]._shared_state if module is not None else {}
    if _MESH not in state:
        return []
    mesh: Mesh = state[_MESH]
    # With sequence parallelism inside context parallelism, cp of the ParallelismConfig is the product of the two sizes.
    return list(mesh.claims if mesh.cp * mesh.sp > mesh.cp > 1 else claims_of_sizes(state.get("parallelism_config")))


def make_parallelism_config(method: Callable[..., None], config: Any) -> None:
    """Replace ``ParallelismConfig.__post_init__``: allow ``cp_size`` together with ``sp_size``; see [Note: cp with sp]."""
    both = [_size_of(config, axis) for axis in ("cp", "sp")]
    if min(both) == 1:
        method(config)
        return
    config.sp_size = 1
    method(config)
    config._set_size("sp", both[1])
    if config.sp_handler is None:
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        config.sp_handler = DeepSpeedSequenceParallelConfig()  # reads the flags of `accelerate launch`


def _size_of(config: Any, axis: str) -> int:
    """Return the size of ``axis`` that a ParallelismConfig under construction will have, from its argument or the environment."""
    given = getattr(config, f"{axis}_size", 1)  # accelerate before 1.12 has no sp_size
    return int(os.environ.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "1")) if given is None else int(given)


def require_same_attention(config: Any, models: Iterable[Any]) -> None:
    """Raise unless ``models`` have the attention implementation of the ``sp_handler`` given with ``cp_size``; others are ignored.

    Raises:
        ConfigError: A model has another implementation.
    """
    handler = vars(config)[_GIVEN].handler if config is not None and _GIVEN in vars(config) else None
    asked = getattr(handler, "sp_attn_implementation", None)
    for model in models:
        settings: Any = getattr(model, "config", None)
        found = getattr(settings.get_text_config() if hasattr(settings, "get_text_config") else settings, "_attn_implementation", None)
        if asked is not None and found not in (None, asked):
            raise ConfigError(
                f"sp_attn_implementation of the ParallelismConfig is {asked!r} and the model was made with attn_implementation={found!r}; "
                "make them equal"
            )


def require_divided(built: Engine) -> None:
    """Raise if accelerate or Trainer has made an engine with sequence-parallel groups, and nothing divides the sequences of its model.

    If a script has made the engine, it may give whole sequences to all ranks of a group, so there is only a warning.

    accelerate cuts batches and registers the model if ``sp_size`` of a ParallelismConfig says so, and does not read
    ``sequence_parallel_size`` of the configuration. Called when an engine is built.

    Raises:
        ConfigError: The model is one of transformers, and was not registered.
    """
    groups, model = getattr(built, "sequence_parallel", None), built.module
    if groups is None or not hasattr(getattr(model, "config", None), "_attn_implementation"):
        return
    if any(bound_forwards(part) is not None or isinstance(part, DistributedAttention) for part in model.modules()):
        return
    size = groups.axis.world
    if not callers.running(methods.PREPARE):
        warn_once(
            f"sequence_parallel_size is {size}, but nothing divides the attention of {type(model).__name__}: a rank that is given a slice "
            "of a sequence attends to the tokens of its slice only. Call UlyssesSPAttentionHF.register_with_transformers(model, ...) and "
            "pass its result as mpu, or use hf_zero.context_parallel_size, which takes whole batches"
        )
        return
    raise ConfigError(
        f"sequence_parallel_size is {size} in the configuration, but nothing divides the sequences of {type(model).__name__}: accelerate "
        f"and Trainer do it if ParallelismConfig(sp_size={size}) is given (parallelism_config=, or accelerate launch "
        f"--parallelism_config_sp_size {size}). Set it too, or hf_zero.context_parallel_size {size} in the configuration, which needs no "
        "ParallelismConfig"
    )


def allow_layers(method: Callable[..., None], model: Any) -> None:
    """Replace accelerate's refusal of layers that pass states along the tokens (linear attention) under ``sp_size``: the engine serves
    them, and its own check of the model refuses those that it does not.
    """


def prepare_tensor_parallel(method: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """Replace ``Accelerator._prepare_tp``: skip it with a DeepSpeed plugin, because ``initialize`` splits the model itself."""
    return args if _is_ours(accelerator.state) else method(accelerator, *args)


def validate_launch(method: Callable[..., Any], args: Any) -> Any:
    """Replace ``_validate_launch_command`` of ``accelerate launch``: also check the configuration file that the flags name.

    Raises:
        ConfigError: The configuration file has mistakes.
    """
    found = _validate_with_sizes(method, args)
    early_checks.check_launch(args)
    return found


def _validate_with_sizes(method: Callable[..., Any], args: Any) -> Any:
    """Run accelerate's check of the flags, and allow a ParallelismConfig with DeepSpeed too; accelerate allows it with FSDP only.

    The check also reads the file of ``accelerate config``, which may choose DeepSpeed or give the sizes. So the check runs first.
    """
    if not hasattr(args, "use_parallelism_config"):  # accelerate before 1.10
        return method(args)
    asked, given = args.use_parallelism_config, dict(vars(args))
    if asked and args.use_fsdp:
        return method(args)
    args.use_parallelism_config = False
    found = method(args)
    if args.use_deepspeed:
        sizes = (getattr(args, f"parallelism_config_{axis}_size", None) or 1 for axis in AXES)
        args.use_parallelism_config = bool(asked or args.use_parallelism_config or any(size > 1 for size in sizes))
    elif asked:
        vars(args).update(given)
        return method(args)  # raises accelerate's own error
    return found


def _is_ours(state: Any) -> bool:
    return getattr(vars(state).get("distributed_type"), "value", None) == "DEEPSPEED" and bool(vars(state).get("deepspeed_plugins"))


def make_plugin(method: Callable[..., Any], plugin: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedPlugin.__post_init__``: warn if accelerate will ignore the plugin because ACCELERATE_USE_CPU is set."""
    if os.environ.get("ACCELERATE_USE_CPU", "").strip().lower() in ("1", "true", "yes", "y", "on", "t"):
        warn_once(
            f"a DeepSpeed plugin was made while ACCELERATE_USE_CPU is {os.environ['ACCELERATE_USE_CPU']}: accelerate and Trainer will "
            "train with DDP, without ZeRO. Unset the variable; ZeRO uses the CPU if there is no accelerator"
        )
    from hf_zero.integrations import script_values  # imports the engine, which a program without a plugin does not need

    return script_values.make_plugin(method, plugin, *args, **kwargs)


def _say_if_left_out(state: Any, plugin: Any) -> None:
    """Warn if accelerate has ignored ``plugin`` because the script or the environment requests the CPU; accelerate says nothing."""
    if plugin is not None and getattr(state, "_cpu", False):
        warn_once(
            f"accelerate ignores the DeepSpeed plugin and trains as {state.distributed_type.value}, because of Accelerator(cpu=True), "
            "ACCELERATE_USE_CPU or `use_cpu: true`. Remove this setting; ZeRO uses the CPU if there is no accelerator"
        )


def _require_same(state: Any, given: Any) -> None:
    present = vars(state).get("parallelism_config")
    if given is None or given is present:
        return
    mesh: Mesh = vars(state)[_MESH]
    if dict.fromkeys(claims_of_sizes(given)) != dict.fromkeys(claims_of_sizes(present)) and not set(claims_of_sizes(given)) <= set(
        mesh.claims
    ):
        raise ConfigError(
            f"an Accelerator of this process already has the mesh {vars(state)[_MESH]}, but another ParallelismConfig was given: "
            f"{given!r}. All Accelerators of a process share one mesh. Give the same ParallelismConfig, or call "
            "AcceleratorState._reset_state() first"
        )


def _solve(state: Any) -> Mesh:
    """Return the mesh of a new ``AcceleratorState``, from its ParallelismConfig, its plugins and the environment."""
    config, said = vars(state).get("parallelism_config"), claims_of_environment(os.environ)
    if config is None and said and hasattr(state, "parallelism_config"):
        raise ConfigError(
            f"{said[0].source} is {said[0].size}, but accelerate made no ParallelismConfig from it: accelerate reads these variables only "
            f"if {_USE} is true, or if the script passes ParallelismConfig() to its Accelerator. Do one of the two, or unset the variable"
        )
    plugins = _plugins(state)
    several = len(plugins) > 1
    for name, plugin in plugins.items():
        said = [*claims_of_config(plugin.deepspeed_config, f" of the plugin {name!r}" if several else ""), *said]
    mesh = solve([*claims_of_sizes(config), *said], state.num_processes, fits_own_node)
    if mesh.cp > 1:
        _require_any_length(config)
    elif config is not None and mesh.sp != getattr(config, "sp_size", 1):
        raise ConfigError(
            f"sequence_parallel_size is {mesh.sp} in the configuration, but sp_size of the ParallelismConfig is 1. Set sp_size={mesh.sp} "
            "there too: accelerate cuts the batches of its loaders by sp_size"
        )
    return mesh


def _require_any_length(config: Any) -> None:
    """Raise if an ``sp_handler`` allows sequences of one length only: context parallelism pads sequences, and compares no lengths."""
    handler: Any = getattr(config, "sp_handler", None)
    if getattr(config, "sp_size", 1) > 1 and getattr(handler, "sp_seq_length_is_variable", True) is False:
        raise ConfigError(
            f"sp_seq_length_is_variable of the ParallelismConfig is False (sp_seq_length is {handler.sp_seq_length}) together with context "
            "parallelism, which takes sequences of every length. Leave both out"
        )


@dataclass(frozen=True)
class _Given:
    """Sizes that a script gave in a ParallelismConfig.

    Attributes:
        sizes: Sizes of the axes.
        handler: The ``sp_handler``.
        written: Sizes that this module wrote in their place.
    """

    sizes: dict[str, int]
    handler: Any
    written: dict[str, int]


def _restore(config: Any) -> None:
    """Give a ParallelismConfig that an earlier state of accelerate used the sizes of the script back, unless the script has set others."""
    given = vars(config).pop(_GIVEN, None)
    if given is not None and config._sizes == given.written:
        config.sp_handler = given.handler
        for axis, size in given.sizes.items():
            config._set_size(axis, size)


def _refuse_both(state: Any, config: Any) -> None:
    """Raise if a ParallelismConfig divides sequences in both ways in a program without a DeepSpeed plugin; accelerate's own rule."""
    cp, sp = (getattr(config, f"{axis}_size", 1) for axis in ("cp", "sp"))
    if min(cp, sp) > 1:
        type(state)._reset_state()
        raise ConfigError(
            f"ParallelismConfig has cp_size {cp} and sp_size {sp}, which need a DeepSpeed plugin together: pass "
            "Accelerator(deepspeed_plugin=...) or TrainingArguments(deepspeed=...), or set one of the sizes to 1"
        )


def _plugins(state: Any) -> dict[str, Any]:
    found = vars(state)["deepspeed_plugins"]
    return found if isinstance(found, dict) else {"": found}


def _tell(state: Any, mesh: Mesh) -> None:
    """Write the sizes of ``mesh`` to the places that accelerate and Trainer read; collective."""
    for plugin in _plugins(state).values() if mesh.tp > 1 else ():
        if requested_ranks(plugin.deepspeed_config) == 1:
            section = plugin.deepspeed_config.get("tensor_parallel") or {}
            plugin.deepspeed_config["tensor_parallel"] = {**section, "autotp_size": mesh.tp}
    config = vars(state).get("parallelism_config")
    if mesh.cp > 1:
        _tell_strategy(state, config)
    made = torch_mesh(mesh, state.device.type) if config is not None or mesh.sharers > 1 or mesh.dp_replicate > 1 else None
    if config is not None:
        before, handler = dict(config._sizes), getattr(config, "sp_handler", None)
        sizes = mesh.sizes if mesh.cp == 1 else {**mesh.sizes, "cp": mesh.cp * mesh.sp, "sp": 1}  # all ranks that share a whole batch
        for axis, size in sizes.items():
            if axis in config._sizes:
                config._set_size(axis, size)
        if mesh.cp > 1 and handler is not None:
            config.sp_handler = None  # else accelerate warns that it ignores it
        setattr(config, _GIVEN, _Given(before, handler, dict(config._sizes)))
        config.device_mesh = made
    state.device_mesh = made


def _tell_strategy(state: Any, config: Any) -> None:
    """Write ``cp_comm_strategy`` of a ParallelismConfig into the plugins' configurations.

    Raises:
        ConfigError: A configuration names another strategy.
    """
    asked = getattr(getattr(config, "cp_handler", None), "cp_comm_strategy", None)
    for plugin in _plugins(state).values():
        own = plugin.deepspeed_config.get("hf_zero") or {}
        present = own.get("context_parallel_strategy")
        if asked not in (None, "allgather") and present is not None and str(present).lower() != asked:
            raise ConfigError(
                f"cp_comm_strategy of the ParallelismConfig is {asked!r} and hf_zero.context_parallel_strategy of the configuration is "
                f"{present!r}. Set one of them only, or both to the same value"
            )
        if asked is not None and present is None:
            plugin.deepspeed_config["hf_zero"] = {**own, "context_parallel_strategy": asked}


def torch_mesh(mesh: Mesh, device_type: str) -> Any:
    """Return ``mesh`` as a torch DeviceMesh, with accelerate's names for joint dimensions; None for one rank. Collective.

    Args:
        mesh: Sizes of the axes.
        device_type: "cpu", "cuda", ...
    """
    if mesh.ranks == 1 or not dist.is_initialized():
        return None
    parts = {"dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp"), "dp_cp": ("dp_replicate", "dp_shard", "cp")}
    dims = mesh.dims
    joint = {name: [axis for axis in axes if axis in dims] for name, axes in parts.items()}
    return device_mesh(dims, device_type, {name: axes for name, axes in joint.items() if axes})
