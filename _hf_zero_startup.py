"""Start-up hook of the `deepspeed` alias: ``hf_zero.pth`` loads this file, by its path, in every Python process.

It must cost next to nothing there, so it imports only ``sys`` (no ``__future__`` even) and puts one finder on
``sys.meta_path``. Everything else happens in :mod:`hf_zero.deepspeed.alias.finder`, on the first question about `deepspeed`, and in
:mod:`hf_zero.integrations.callers`, when a module is imported whose methods say who is calling.
"""

import sys

# The modules of `hf_zero.integrations.methods.METHODS`.
WATCHED = frozenset(
    (
        "accelerate.accelerator",
        "accelerate.commands.launch",
        "accelerate.parallelism_config",
        "accelerate.state",
        "accelerate.utils.dataclasses",
        "accelerate.utils.deepspeed",
        "adapters.trainer",
        "diffusers.models.modeling_utils",
        "lightning.fabric.strategies.deepspeed",
        "lightning.fabric.wrappers",
        "lightning.pytorch.callbacks.model_checkpoint",
        "lightning.pytorch.core.saving",
        "lightning.pytorch.loops.fit_loop",
        "lightning.pytorch.loops.training_epoch_loop",
        "lightning.pytorch.plugins.precision.deepspeed",
        "lightning.pytorch.strategies.deepspeed",
        "lightning.pytorch.trainer.connectors.signal_connector",
        "lightning.pytorch.utilities",
        "lightning.pytorch.utilities.grads",
        "lightning_fabric.strategies.deepspeed",
        "lightning_fabric.wrappers",
        "peft.tuners.frod.model",
        "peft.tuners.tuners_utils",
        "pytorch_lightning.callbacks.model_checkpoint",
        "pytorch_lightning.core.saving",
        "pytorch_lightning.loops.fit_loop",
        "pytorch_lightning.loops.training_epoch_loop",
        "pytorch_lightning.plugins.precision.deepspeed",
        "pytorch_lightning.strategies.deepspeed",
        "pytorch_lightning.trainer.connectors.signal_connector",
        "pytorch_lightning.utilities",
        "pytorch_lightning.utilities.grads",
        "safetensors.torch",
        "sentence_transformers.base.trainer",
        "torch.distributed.launcher.api",
        "transformers.integrations.deepspeed",
        "transformers.modeling_utils",
        "transformers.trainer",
        "transformers.trainer_jit_checkpoint",
        "transformers.training_args",
        "trl.trainer.dpo_trainer",
        "trl.trainer.kto_trainer",
    )
)


def _is_importable():  # type: ignore[no-untyped-def]
    """Whether ``import hf_zero`` gives this package. A file or folder of the user's own of that name comes first on ``sys.path``.

    Nothing is imported to find out: the user's file may be the script that is running.
    """
    if "hf_zero.deepspeed.alias.finder" in sys.modules:
        return True
    from importlib.machinery import PathFinder

    package = sys.modules.get("hf_zero", False)
    if package is None:  # imports of it are barred, as for zero_to_fp32.py alone
        return False
    spec = PathFinder.find_spec("hf_zero") if package is False else getattr(package, "__spec__", None)
    if spec is None:  # the package is gone, or something without a spec stands in for it
        return False
    places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec("hf_zero.deepspeed", places) is not None:
        return True
    import warnings

    warnings.warn(
        f"{spec.origin or list(places or ())} is named hf_zero and hides the installed package, which therefore does not answer as "
        "`deepspeed`; rename it",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


class DeepSpeedAliasFinder:
    """Answers for the module `deepspeed` and for the distribution `deepspeed`; says nothing about any other name.

    The modules of ``WATCHED`` are what the other finders find; a loader that also wraps their methods is all that is added.

    It stands first on ``sys.meta_path`` because a bare folder named ``deepspeed`` (of JSON files, say) in the working
    directory is a namespace package to the path finder and would hide us. A real DeepSpeed still wins, see
    :func:`hf_zero.deepspeed.alias.finder.alias_is_active`.
    """

    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]  # naming the types would import them
        """The spec of `deepspeed`, of one of its submodules or of a watched module, else None."""
        ours = fullname == "deepspeed" or fullname.startswith("deepspeed.")
        if not (ours or fullname in WATCHED) or not _is_importable():
            return None
        from hf_zero.deepspeed.alias.finder import alias_is_active, find_spec

        if not alias_is_active():
            return None
        from hf_zero.integrations import callers

        if not ours:
            return callers.find_spec(fullname, path, target)
        if fullname == "deepspeed":
            callers.watch()
        return find_spec(fullname)

    @staticmethod
    def find_distributions(context=None):  # type: ignore[no-untyped-def]
        """The distribution `deepspeed` when it is asked for by name.

        Listings (no name) leave it out: pip must not take DeepSpeed for installed.
        """
        name = getattr(context, "name", None)
        if name is None or name.lower() != "deepspeed" or not _is_importable():
            return iter(())
        from hf_zero.deepspeed.alias.finder import find_distributions

        return find_distributions()


if DeepSpeedAliasFinder not in sys.meta_path:
    sys.meta_path.insert(0, DeepSpeedAliasFinder)  # type: ignore[arg-type]
