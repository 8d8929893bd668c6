"""Settings that only hf_zero has: the section ``hf_zero``."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Float, Int, NonNegative, Positive, Section, Size, used


def _signal_name(value: Any) -> Any:
    """Return the name of a signal from the usual spellings: "SIGUSR1", "usr1", its number; "none" for no signal."""
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
        "Stage 3: gather the whole model once around each generate(). auto does so if the model fits into 60 % of the free memory of every "
        "rank; false gathers block by block for every token",
    )
    hang_report_s: NonNegative = used(
        30.0,
        "Seconds that a rank waits in one collective before it reports, in one line, the operation, unit and block, the ranks that have "
        "not arrived, and the Python lines where they are; repeated after 5 times as long. 0 is off",
    )
    offload_overlap: Annotated[Literal["auto", "none", "forward", "full"], ANY_CASE] = used(
        "auto",
        "With offload_optimizer and native optimizers (hf_zero.ops), when the host updates: none inside step(); forward also while the "
        "next forward runs (stage 3); full also during backward, on a second copy of the states if it fits into half of the free host "
        "memory; auto is full where the training device has memory of its own, else none. The numbers are the same",
    )
    context_parallel_size: Count | None = used(
        None,
        "Ranks that share their samples, each with a part of every sequence, and gather keys and values in attention; 1 is off. Groups of "
        "sequence_parallel_size are inside these groups, groups of tensor_parallel are adjacent ranks. Batch sizes count such groups once",
    )
    context_parallel_strategy: Annotated[Literal["allgather", "alltoall"], ANY_CASE] = used(
        "allgather",
        "How keys and values reach the ranks of context_parallel_size: allgather sends all of them in one message per layer; alltoall "
        "passes them around while attention to the keys that have arrived is computed",
    )
    param_shard_size: Annotated[Literal["node"], ANY_CASE] | Annotated[Int, Field(ge=2)] | None = used(
        None,
        "Stage 3: adjacent ranks that parameters are sharded over and gathered from, in the training dtype; gradients, masters and "
        "optimizer states stay sharded over all ranks. node means the ranks of each node; unset means all ranks",
    )
    checkpoint_url: str | None = used(
        None,
        "URL in an object store (s3://bucket/run, gs://, hf:// and other stores of fsspec) for the engine's checkpoints: a checkpoint "
        "for the folder a/b is written to URL/b. Trainer's own small files are written there too, and save_total_limit applies there. "
        "Keys and passwords belong into the environment (AWS_ACCESS_KEY_ID, ...)",
    )
    replicas: Annotated[Literal["none", "torchft"], ANY_CASE] = used(
        "none",
        "torchft: the ranks of this job are one of several replica groups, each started by a launcher of its own with REPLICA_GROUP_ID and "
        "TORCHFT_LIGHTHOUSE in the environment. Gradients are averaged over the groups that take part; a group that dies is "
        "excluded at the boundary, and gets the state of the others when it returns. Batches come from hf_zero.utils.ReplicaSampler",
    )
    snapshot_steps: Size = used(
        0,
        "Optimizer steps between two snapshots with the content of a checkpoint, in host memory that outlives the ranks. Ranks that "
        "torchrun or accelerate launch restart (max_restarts) continue from the newest one. Trainer takes and loads them; a loop calls "
        "engine.snapshot(client_state) after each step. 0 is off",
    )
    snapshot_folder: str | None = used(
        None,
        "With snapshot_steps: folder in host memory (a tmpfs) with room for two snapshots of the ranks of a node; unset is /dev/shm",
    )
    pickle_client_state: Bool = used(
        False,
        "Pickle values of client_state that are neither plain nor tensors, and read such values; a pickle can run any code of its writer",
    )
    expert_load: Size = used(
        0,
        "With expert_parallel: optimizer steps between two records of how tokens are distributed over experts and ranks (the largest "
        "number divided by the mean, in the log and in monitors); 0 is off",
    )
    expert_load_each: Bool = used(
        False,
        "With expert_load: also record the tokens of each expert, one line per layer in the log and Train/Experts/.../tokens/... in "
        "monitors",
    )
    preemption_signal: Annotated[Signal, BeforeValidator(_signal_name)] = used(
        "SIGTERM",
        "Signal that asks a rank to end: all ranks finish the optimizer step, save once and end with status 75. Trainer, Lightning and "
        "scripts that call hf_zero.utils.preempted() need no further settings. A name given here is caught from initialize on (Slurm: "
        "SIGUSR1). none leaves signals alone",
    )
    preemption_save_dir: str | None = used(
        None,
        "Folder that the engine itself saves to at the step at which its ranks agree to end, for scripts that do not call "
        "hf_zero.utils.preempted(); load_checkpoint from it continues the run. Not used under Trainer and Lightning, which have their own "
        "folders",
    )
    step_metrics: Size = used(
        0,
        "Optimizer steps between two records of tokens per second and rank, model FLOPs utilisation, memory per tier and time waited for "
        "gathers, reductions, offload and data: a line in the log, Train/Speed, Train/Memory and Train/Waited in monitors, speed, memory "
        "and waited in Trainer's logs; 0 is off",
    )
    spike_factor: Literal[0] | Annotated[Float, Field(ge=1)] = used(
        0,
        "A gradient norm above this many times the median of the last 100 optimizer steps is a spike: the log names the step, the norm and "
        "the samples of its batch. The first 20 steps are none, unless the norm is not finite; 0 is off",
    )
    loss_spike_factor: Literal[0] | Annotated[Float, Field(ge=1)] = used(
        0,
        "The same for the loss: the mean over all ranks of the losses that a step back-propagates. Losses are compared while their median "
        "is above 0; 0 is off",
    )
    spike_action: Annotated[Literal["log", "skip", "rewind"], ANY_CASE] = used(
        "log",
        "With spike_factor or loss_spike_factor: skip drops the gradients of such a step, as a step that overflows does; weights, moments "
        "and the scheduler stay. rewind (with snapshot_steps) restores the newest snapshot or checkpoint and continues with the batches "
        "after the spike. After 10 spikes in succession the comparison starts again without former values. Checkpoints hold these values",
    )
    show_gradients: Bool = used(
        False,
        "Stages 1 to 3, and every stage with tensor parallelism or experts: param.grad between the backward that completes an optimizer "
        "step and the step is the whole reduced gradient, gathered when a script reads it, and changes in place count. Every rank must "
        "read the same parameters. If false it is None, as with DeepSpeed, and a read warns; at stage 0 it is this rank's part",
    )
    peak_tflops: Positive | None = used(
        None,
        "With step_metrics: peak of one device in 10^12 operations per second, the base of utilisation; unset: from a table of devices",
    )
    trace_folder: str | None = used(
        None, "Folder for a recording of one optimizer step of each rank by torch.profiler, which hf-zero trace reads; unset is off"
    )
    trace_step: Size = used(2, "With trace_folder: optimizer steps before the one that is recorded")
