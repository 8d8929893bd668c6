"""Provide DeepSpeed's operator builders, which report whether an operator is available; hf_zero compiles nothing at run time."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from hf_zero.deepspeed.alias.finder import RefusedAttributeError


class OpBuilder:
    """A replacement of DeepSpeed's operator builders, for code that checks whether an operator is available, or builds it early.

    Args:
        name: Has no effect, because each builder class has its own name.
    """

    NAME: ClassVar[str] = ""
    USE: ClassVar[str] = ""
    """Alternative to the operator's functions; "" if there is none."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether hf_zero supports the feature that the operator is for."""
        return bool(self.USE)

    def builder_available(self) -> bool:
        """Return the same as ``is_compatible``."""
        return self.is_compatible()

    def absolute_name(self) -> str:
        """Return the dotted name of the operator in DeepSpeed."""
        return f"deepspeed.ops.{self.NAME}_op"

    def load(self, verbose: bool = True) -> LoadedOp:
        """Return an object without functions, because there is nothing to build.

        Raises:
            RefusedAttributeError: hf_zero does not support the feature.
        """
        if not self.USE:
            raise RefusedAttributeError(f"{type(self).__name__}().load(): hf_zero does not implement the operator {self.NAME!r}")
        return LoadedOp(self)

    jit_load = load


class LoadedOp:
    """A loaded operator without functions; scripts use the class that implements it (for example an optimizer)."""

    def __init__(self, builder: OpBuilder) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise RefusedAttributeError(f"the operator {self._builder.NAME!r} has no function {name!r} here; use {self._builder.USE}")


def _builder(class_name: str, name: str, use: str = "") -> type[OpBuilder]:
    text = f"Builder of `{name}`." if use else f"Builder of `{name}`, which hf_zero does not have."
    return type(class_name, (OpBuilder,), {"NAME": name, "USE": use, "__doc__": text, "__module__": __name__})


_ADAM = "deepspeed.ops.adam.DeepSpeedCPUAdam"
BUILDERS: Final[dict[str, type[OpBuilder]]] = {
    class_name: _builder(class_name, name, use)
    for class_name, name, use in (
        ("AsyncIOBuilder", "async_io", "offload_optimizer or offload_param with device nvme"),
        ("CPUAdamBuilder", "cpu_adam", _ADAM),
        ("FusedAdamBuilder", "fused_adam", "deepspeed.ops.adam.FusedAdam"),
        ("CPUAdagradBuilder", "cpu_adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad"),
        ("CPULionBuilder", "cpu_lion", "deepspeed.ops.lion.DeepSpeedCPULion"),
        ("FusedLionBuilder", "fused_lion", "deepspeed.ops.lion.FusedLion"),
        ("UtilsBuilder", "utils", "torch._utils._flatten_dense_tensors and _unflatten_dense_tensors"),
        ("FusedLambBuilder", "fused_lamb", "deepspeed.ops.lamb.FusedLamb"),
        ("EvoformerAttnBuilder", "evoformer_attn", ""),
        ("GDSBuilder", "gds", ""),
        ("InferenceBuilder", "transformer_inference", ""),
        ("SparseAttnBuilder", "sparse_attn", ""),
        ("TransformerBuilder", "transformer", ""),
    )
}
"""Builders by class name."""

ALL_OPS: Final = {builder.NAME: builder() for builder in BUILDERS.values()}
_WITHOUT_BUILDER = (
    *("deepspeed_ccl_comm", "deepspeed_shm_comm", "dc", "fp_quantizer", "inference_core_ops", "cutlass_ops", "quantizer"),
    *("ragged_device_ops", "ragged_ops", "random_ltd", "spatial_inference", "stochastic_transformer"),
)
"""Operators whose builders no known script uses."""
COMPATIBLE_OPS: Final = {name: builder.is_compatible() for name, builder in ALL_OPS.items()} | dict.fromkeys(_WITHOUT_BUILDER, False)


def __getattr__(name: str) -> Any:
    """Return the builder class of the given name."""
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(name)
