"""Settings of our own: the section ``hf_zero``."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Int, NonNegative, Positive, Section, Size, used


def _signal_name(value: Any) -> Any:
    """Return the name of a signal from the usual spellings: "SIGUSR1", "usr1", its number; "none" for none."""
    text = str(value).strip().upper()
    if value in (None, False) or text == "NONE":
        return "none"
    if text.isdecimal() and int(text) in set(signal.Signals):
        return signal.Signals(int(text)).name
    return text if text.startswith("SIG") else f"SIG{text}"


Signal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT", "SIGXCPU", "none"]


class OwnSettings(Section):
    """`hf_zero`. Settings that DeepSpeed does not have."""

    gather_for_generation: Annotated[Literal["auto"], ANY_CASE] | Bool = used(
        "auto",
        "Stage 3: gather the whole model once around each generate(); auto does it where it fits into 60 % of the free memory of every "
        "rank, false gathers block by block for every token",
    )
    hang_report_s: NonNegative = used(
        30.0,
        "Seconds that a rank waits in one collective before it says in one line for which operation, unit and block, which ranks have "
        "not come, and at which Python line those are; told again after 5 times as long. 0 is off",
    )
    offload_overlap: Annotated[Literal["auto", "none", "forward", "full"], ANY_CASE] = used(
        "auto",
        "With offload_optimizer, when native optimizers (hf_zero.ops) update on the host: none inside step(); forward also while the next "
        "forward runs (stage 3); full also during backward, on a second copy of the states as far as it fits into half of the free host "
        "memory; auto is full where the training device has memory of its own, else none. The numbers are the same",
    )
    context_parallel_size: Count | None = used(
        None,
        "Ranks that share their samples, each with a part of every sequence, and gather keys and values in attention; 1 is off. With "
        "sequence_parallel_size these groups lie inside, with tensor_parallel they are further apart. Batch sizes count such groups once",
    )
    context_parallel_strategy: Annotated[Literal["allgather", "alltoall"], ANY_CASE] = used(
        "allgather",
        "Way of keys and values to the ranks of context_parallel_size: allgather brings all of them in one message per layer, alltoall "
        "passes them around while attention to those that have arrived is computed",
    )
    param_shard_size: Annotated[Literal["node"], ANY_CASE] | Annotated[Int, Field(ge=2)] | None = used(
        None,
        "Stage 3: adjacent ranks that parameters are sharded over and gathered from, in the training type; gradients, masters and "
        "optimizer states stay sharded over all ranks. node is the ranks of each node; unset is all ranks",
    )
    checkpoint_url: str | None = used(
        None,
        "URL in an object store (s3://bucket/run, gs://, hf:// and whatever fsspec reaches) for the engine's checkpoints: what would go "
        "to the folder a/b goes to URL/b. Under Trainer its own small files go there too, and save_total_limit holds there. Keys and "
        "passwords belong into the environment (AWS_ACCESS_KEY_ID, ...)",
    )
    pickle_client_state: Bool = used(
        False,
        "Pickle values of client_state that are neither plain nor tensors, and read such values: a pickle runs what its writer wanted",
    )
    expert_load: Size = used(
        0,
        "With expert_parallel: optimizer steps between two records of how tokens spread over experts and ranks (the most over the "
        "mean, in the log and in monitors); 0 is off",
    )
    expert_load_each: Bool = used(
        False, "With expert_load: also the tokens of each expert, a line per layer in the log and Train/Experts/.../tokens/... in monitors"
    )
    preemption_signal: Annotated[Signal, BeforeValidator(_signal_name)] = used(
        "SIGTERM",
        "Signal that asks a rank to end: all ranks finish the optimizer step, save once and end with status 75. Under Trainer and "
        "Lightning, and in scripts that ask hf_zero.utils.preempted(), without further settings; a name given here is listened for from "
        "initialize on (Slurm: SIGUSR1). none leaves signals alone",
    )
    preemption_save_dir: str | None = used(
        None,
        "Folder that an engine saves to by itself at the step at which its ranks agree to end, for scripts that do not ask "
        "hf_zero.utils.preempted(); load_checkpoint of it goes on. Not used under Trainer and Lightning, which have folders of their own",
    )
    step_metrics: Size = used(
        0,
        "Optimizer steps between two records of tokens per second and rank, model FLOPs utilisation, memory per tier and time waited for "
        "gathers, reductions, offload and data: a line in the log, Train/Speed, Train/Memory and Train/Waited in monitors, speed, memory "
        "and waited in Trainer's logs; 0 is off",
    )
    peak_tflops: Positive | None = used(
        None,
        "With step_metrics: 10^12 operations per second of one device at its best, which utilisation is a share of; unset: a table",
    )
    trace_folder: str | None = used(
        None, "Folder for a recording of one optimizer step of each rank by torch.profiler, which hf-zero trace reads; unset is off"
    )
    trace_step: Size = used(2, "With trace_folder: optimizer steps before the one that is recorded")
