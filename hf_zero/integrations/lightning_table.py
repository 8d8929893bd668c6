"""Table of the methods of Lightning that hf_zero wraps, each under both of Lightning's package names.

Imports no library, like ``methods.py``.
"""

from __future__ import annotations

from hf_zero.integrations.methods import DELETED, UNSAVED, Method

LIGHTNING_SAVE = Method("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint._save_checkpoint", DELETED)
OLD_LIGHTNING_SAVE = Method("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint._save_checkpoint", DELETED)


def _of_lightning(module: str, name: str, around: str, seen: bool = False, loss: str = UNSAVED) -> tuple[Method, Method]:
    """Return the entries of a method of Lightning, one for each of Lightning's two package names."""
    around = f"hf_zero.integrations.lightning_methods:{around}"
    return (
        Method(f"lightning.pytorch.{module}", name, loss, around, seen, (2,)),
        Method(f"pytorch_lightning.{module}", name, loss, around, seen, (2,)),
    )


LIGHTNING_FITS = _of_lightning("loops.fit_loop", "_FitLoop.run", "run", seen=True)
LIGHTNING_SIGNALS = (
    *_of_lightning("loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end", "on_advance_end"),
    *_of_lightning("trainer.connectors.signal_connector", "_SignalConnector.register_signal_handlers", "register_signal_handlers"),
)
LIGHTNING_CLIPPING = tuple(
    method
    for name in ("clip_gradients", "optimizer_step")
    for method in _of_lightning(
        "plugins.precision.deepspeed",
        f"DeepSpeedPrecision.{name}",
        name,
        loss="clip_gradients() of a LightningModule does nothing, or clips all steps",
    )
)
LIGHTNING_BACKWARD = _of_lightning(
    "plugins.precision.deepspeed",
    "DeepSpeedPrecision.backward",
    "backward",
    loss="the backward() that a LightningModule overrides is not called",
)
LIGHTNING_NORMS = tuple(  # the package has the function under its own name, and may be imported before hf_zero wraps anything
    method
    for module in ("utilities.grads", "utilities")
    for method in _of_lightning(module, "grad_norm", "grad_norm", loss="grad_norm() of Lightning finds no gradients at stages 1 to 3")
)
LIGHTNING_FILES = tuple(
    Method(
        f"{package}.core.saving",
        "pl_load",
        "load_from_checkpoint() of a LightningModule cannot read the folder of a checkpoint",
        around="hf_zero.integrations.lightning_files:load_file",
        since=(2,),
    )
    for package in ("lightning.pytorch", "pytorch_lightning")
)
LIGHTNING_STRATEGIES = tuple(
    Method(
        f"{package}.strategies.deepspeed",
        f"DeepSpeedStrategy.{name}",
        "Lightning's DeepSpeed strategies accumulate, clip and load single files in another way than its other strategies",
        around=around if ":" in around else f"hf_zero.integrations.lightning_steps:{around}",
        since=(2, 1) if name == "load_module_state_dict" else (2,),
    )
    for packages, names in (
        (
            ("lightning.pytorch", "pytorch_lightning"),
            {
                "handles_gradient_accumulation": "handles_gradient_accumulation",
                "block_backward_sync": "block_backward_sync",
                "backward": "backward",
                "init_deepspeed": "init_deepspeed",
                "_format_batch_size_and_grad_accum_config": "format_batch_sizes",
                "_auto_select_batch_size": "batch_size",
                "lightning_restore_optimizer": "restores_optimizer",
                "load_model_state_dict": "hf_zero.integrations.lightning_files:load_weights",
                "load_optimizer_state_dict": "load_optimizer",
                "save_checkpoint": "save_checkpoint",
                "load_checkpoint": "load_checkpoint",
            },
        ),
        (
            ("lightning.fabric", "lightning_fabric"),
            {
                "__init__": "make_strategy",
                "setup_module_and_optimizers": "set_up",
                "optimizer_step": "optimizer_step",
                "clip_gradients_norm": "clip_norm",
                "clip_gradients_value": "clip_value",
                "load_module_state_dict": "load_module",
                "load_checkpoint": "load_state",
            },
        ),
    )
    for package in packages
    for name, around in names.items()
)
FABRIC_STEPS = tuple(
    Method(
        f"{package}.wrappers",
        "_FabricOptimizer.step",
        "with several models of one Fabric, optimizer.step() steps the model of the last backward",
        around="hf_zero.integrations.fabric_methods:step",
        since=(2,),
    )
    for package in ("lightning.fabric", "lightning_fabric")
)

METHODS = (
    LIGHTNING_SAVE, OLD_LIGHTNING_SAVE, *LIGHTNING_FITS, *LIGHTNING_SIGNALS, *LIGHTNING_CLIPPING, *LIGHTNING_BACKWARD, *LIGHTNING_NORMS,
    *LIGHTNING_FILES, *LIGHTNING_STRATEGIES, *FABRIC_STEPS,
)  # fmt: skip
