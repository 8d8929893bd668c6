"""Estimate the memory of model states on a device and its host: `estimate_zero{2,3}_model_states_mem_needs*`.

The names and arguments are DeepSpeed's (https://deepspeed.readthedocs.io/en/latest/memory.html), the numbers are hf_zero's:
16-bit training with Adam on N ranks needs, per parameter, 2 bytes for weights, 12 bytes / N for fp32 master and moments (from stage 1 on)
and 4 bytes / N for fp32 gradient shards. At stage 3 the weights need 2 bytes / N, and the blocks in use are unsharded. Activations are not
included.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from torch import nn

from hf_zero.core.units.unit import full_shape
from hf_zero.system.sizes import size_text

_WEIGHT, _STATE, _GRADIENT, _LOADED = 2, 12, 4, 4  # bytes per parameter; _LOADED is for an fp32 model before it is cast
# 16-bit weights of the block in use and of the next one, and 16-bit gradients of one block.
_BLOCKS_AT_ONCE = 3


def estimate_zero2_model_states_mem_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True, additional_buffer_factor: float = 1.5
) -> tuple[int, int]:
    """Return the estimated memory at stage 2, with 16-bit weights and Adam.

    Args:
        total_params: Parameters of the model.
        num_gpus_per_node: Ranks on one host.
        num_nodes: Hosts.
        cpu_offload: Whether masters, moments and gradient shards are on the host.
        additional_buffer_factor: Factor of the margin for host memory.

    Returns:
        Host memory of one node while the model is loaded or trained, and memory of one device, in bytes.
    """
    ranks = num_gpus_per_node * num_nodes
    states = (_STATE + _GRADIENT) * total_params // ranks
    loading = _LOADED * total_params * num_gpus_per_node
    host = max(loading, states * num_gpus_per_node) if cpu_offload else loading
    return int(host * additional_buffer_factor), _WEIGHT * total_params + (0 if cpu_offload else states)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the estimated memory at stage 3, with 16-bit weights and Adam.

    Args:
        total_params: Parameters of the model.
        largest_layer_params: Parameters of its largest layer.
        num_gpus_per_node: Ranks on one host.
        num_nodes: Hosts.
        cpu_offload: Whether masters, moments and gradient shards are on the host.
        cpu_offload_params: Whether shards of the weights are on the host too.
        zero_init: Whether the model is built under ``zero.Init``, so that no rank holds it unsharded.
        additional_buffer_factor: Margin for host memory.

    Returns:
        Host memory of one node, memory of one device, and the part of the device memory for the layers in use, in bytes.
    """
    ranks = num_gpus_per_node * num_nodes
    layers = _BLOCKS_AT_ONCE * _WEIGHT * largest_layer_params
    weights, states = _WEIGHT * total_params // ranks, (_STATE + _GRADIENT) * total_params // ranks
    resting = (states if cpu_offload else 0) + (weights if cpu_offload and cpu_offload_params else 0)
    loading = _LOADED * (largest_layer_params if zero_init else total_params * num_gpus_per_node)
    host = max(loading, resting * num_gpus_per_node)
    return int(host * additional_buffer_factor), layers + weights + states - resting, layers


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that ``model`` needs at stage 2; for the arguments see ``estimate_zero2_model_states_mem_needs``."""
    estimate_zero2_model_states_mem_needs_all_cold(_sizes(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory at stage 2 like ``..._all_live``, for a model of which only the size is known."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor)
        rows.append((host, device, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _print(f"ZeRO-2, {total_params / 1e6:,.0f}M parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that ``model`` needs at stage 3; for the arguments see ``estimate_zero3_model_states_mem_needs``."""
    estimate_zero3_model_states_mem_needs_all_cold(*_sizes(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory at stage 3 like ``..._all_live``, for a model of which only the sizes are known."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params, zero_init, additional_buffer_factor
            )
            offload = f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if optimizer else 'none'}"
            rows.append((host, device, f"{offload}, zero_init={int(zero_init)}"))
    sizes = f"{total_params / 1e6:,.0f}M parameters, largest layer {largest_layer_params / 1e6:,.0f}M"
    _print(f"ZeRO-3, {sizes}", num_gpus_per_node, num_nodes, rows)


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of parameters of the model (shared ones counted once) and of its largest single module, sharded or not."""
    layers = [sum(full_shape(param).numel() for param in module.parameters(recurse=False)) for module in model.modules()]
    return sum(full_shape(param).numel() for param in model.parameters()), max(layers, default=0)


def _print(title: str, per_node: int, nodes: int, rows: Iterable[tuple[int, int, str]]) -> None:
    table = Table(title=f"{title}; {nodes} node(s) with {per_node} device(s)", caption="weights, gradients, masters and moments")
    table.add_column("per host", justify="right")
    table.add_column("per device", justify="right")
    table.add_column("options")
    for host, device, options in rows:
        table.add_row(*(size_text(nbytes, ",.2f", "GiB") for nbytes in (host, device)), options)
    Console().print(table)
