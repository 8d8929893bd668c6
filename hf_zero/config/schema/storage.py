"""Sections for files and memory: checkpoints, NVMe access, saved activations, compiled graphs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Int, NonNegative, Section, accepted, part, refused, section, used


def _false_is_none(value: Any) -> Any:
    """Return None for `false`, which published files use to switch this number off."""
    return None if value is False else value


class ActivationCheckpointing(Section):
    """`activation_checkpointing`. Settings of deepspeed.checkpointing.
    The settings hold for functions run through `deepspeed.checkpointing.checkpoint`. A transformers model uses it after
    `model._set_gradient_checkpointing(True, deepspeed.checkpointing.checkpoint)`, but not after its own `gradient_checkpointing_enable()`.
    """

    partition_activations: Bool = used(
        False, "Each model-parallel rank keeps its part of saved inputs, which backward gathers; no effect without model-parallel ranks"
    )
    cpu_checkpointing: Bool = used(False, "Keep saved inputs in page-locked host memory; backward fetches them one function ahead")
    contiguous_memory_optimization: Bool = accepted(
        False,
        "Copy saved activations to one buffer",
        "PyTorch's allocator reuses blocks of one size, and expandable segments do not fragment",
    )
    number_checkpoints: Annotated[Int | None, BeforeValidator(_false_is_none)] = accepted(
        None, "Checkpoint count for that buffer", "only read together with contiguous_memory_optimization"
    )
    synchronize_checkpoint_boundary: Bool = used(False, "Synchronise the device before and after each checkpointed function")
    profile: Bool = used(False, "Log the time of each checkpointed function, forward and recomputation")


class ParallelWrite(Section):
    """`checkpoint.parallel_write`. Parallel writing."""

    pipeline_stage: Bool = part(False, "Pipeline stages write in parallel")


_OWN_WRITER = "files are written in windows of 4 MiB straight from the shards"


class Writer(Section):
    """`checkpoint.writer`. Fast checkpoint writer."""

    type: Annotated[Literal["fast", "python", "mock"], ANY_CASE] = used(
        "FAST", "`fast` and `mock` bypass the page cache where the file system allows, like the default; `python` writes through it"
    )
    io_buffer_size: Int = accepted(67108864, "Buffer bytes", _OWN_WRITER)
    io_buffer_double: Bool = accepted(True, "Two buffers", _OWN_WRITER)
    show_statistics: Bool = accepted(False, "Print statistics", "the log line of a saved checkpoint has the seconds")
    data_parallel: str | None = accepted(None, "replica socket or machine", "every rank writes its own part, at stage 0 too")
    decoupled: Bool = used(False, "Write checkpoints in the background: save_checkpoint returns when the shards are copied to host memory")
    io_multiplier: Int = accepted(1, "Buffers per writer", _OWN_WRITER)


class Checkpoint(Section):
    """`checkpoint`. Options of save and load."""

    tag_validation: Annotated[Literal["ignore", "warn", "fail"], ANY_CASE] = used(
        "warn", "ignore, warn or fail when ranks give different tags; without fail, every rank writes to rank 0's folder"
    )
    load_universal: Bool = accepted(False, "Load the universal format", "every checkpoint loads on any number of ranks")
    use_node_local_storage: Bool = used(
        False, "Each node writes the files of its ranks to its own disk and loads them from it; use it with save_on_each_node of Trainer"
    )
    parallel_write: ParallelWrite | None = accepted(None, "Parallel writing", "every rank writes its own file")
    checkpoint_serialization: Bool = accepted(True, "Serialise with the torch zip format", "files are safetensors and JSON, never pickle")
    writer: Writer | None = section(None, "Fast checkpoint writer")


class DataStates(Section):
    """`datastates_ckpt`. Asynchronous engine; any value except false enables it."""

    host_cache_size: NonNegative | None = used(
        None, "GiB of host memory for the copy; the remainder is written before save_checkpoint returns; unset is no limit"
    )


class Aio(Section):
    """`aio`. How swap files of NVMe offload are accessed."""

    block_size: Count = used(1048576, "Bytes per read or write, in multiples of 4096")
    queue_depth: Annotated[Int, Field(ge=1)] = used(8, "Requests in flight: threads that read and write")
    intra_op_parallelism: Int = accepted(1, "Threads per request", "every request is one thread; queue_depth sets their number")
    thread_count: Int = accepted(1, "Documented name of intra_op_parallelism", "see intra_op_parallelism")
    single_submit: Bool = accepted(False, "Submit requests one by one", "requests go to threads, not to a kernel queue")
    overlap_events: Bool = accepted(True, "Overlap submission and completion", "requests complete in the disk's order")
    use_gds: Bool = refused(False, "GPUDirect storage", "not supported: reads and writes pass through page-locked host memory")


class Compile(Section, switch="deepcompile"):
    """`compile`. DeepCompile."""

    deepcompile: Bool = accepted(
        False,
        "Use the DeepCompile passes",
        "engine.compile() compiles each block; the engine gathers, prefetches and reduces around the graphs",
    )
    autoep_non_moe: Bool = refused(
        False,
        "engine.compile() compiles the modules around layers of experts, but not these layers",
        "not supported: call torch.compile() on the modules",
    )
    free_activation: Bool = accepted(False, "Free activations early", "autograd frees a saved tensor with the node that used it")
    free_activation_threshold: Int = accepted(10485760, "Smallest freed tensor", "see `free_activation`")
    offload_activation: Bool = refused(
        False,
        "Offload activations; needs a custom schedule",
        "use activation_checkpointing.cpu_checkpointing, or checkpointing with offload",
    )
    offload_activation_pin_memory: Bool = accepted(True, "Pin that host memory", "read with `offload_activation`, which is refused")
    offload_opt_states: Bool = refused(False, "Offload optimizer states", "use zero_optimization.offload_optimizer")
    double_buffer: Bool = accepted(True, "Two gather buffers", "a gather fills the buffer of its own unit")
    symmetric_memory: Bool = accepted(False, "Use symmetric memory", "collectives are those of torch.distributed")
    debug_log: Bool = accepted(False, "Verbose log", "TORCH_LOGS shows graphs and breaks")
    enabled: Bool = used(False, "Key of DeepSpeed 0.14: initialize compiles the blocks, as engine.compile() does")
    disable: Bool = used(False, "Key of DeepSpeed 0.14: do not compile, even if `enabled` is true")
    backend: str = used("inductor", "Key of DeepSpeed 0.14: backend of torch.compile")
    kwargs: dict[str, Any] | None = used(None, "Key of DeepSpeed 0.14: further arguments of torch.compile")
    offload_parameters: Bool = refused(False, "Offload parameters", "use zero_optimization.offload_param")
    sync_before_reduce: Bool = accepted(False, "Synchronise before reduction", "the engine waits where a result is used")
    sync_after_reduce: Bool = accepted(False, "Synchronise after reduction", "the engine waits where a result is used")
    sync_before_allgather: Bool = accepted(False, "Synchronise before gathering", "the engine waits where a result is used")
    sync_after_allgather: Bool = accepted(False, "Synchronise after gathering", "the engine waits where a result is used")
    keep_int_input_tensors: Bool = accepted(True, "Keep integer inputs for tracing", "torch.compile keeps what its guards need")
    keep_all_input_tensors: Bool = accepted(False, "Keep all inputs for tracing", "torch.compile keeps what its guards need")
    passes: list[str] | None = accepted(
        None, "z1 z3 autosp autotp", "`zero_optimization.stage` selects the sharding; autosp and autotp are refused"
    )
