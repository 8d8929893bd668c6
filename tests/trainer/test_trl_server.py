"""TRL's GRPO with a server in another process: it has the trainer's weights before every generation, and training goes as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers, trl_runs, weight_server

LOGGED = ("loss", "grad_norm", "reward", "completions/mean_length", "sampling/importance_sampling_ratio/mean")


@pytest.mark.slow  # fast: test_weight_receivers.py, test_example_rl.py
def test_grpo_trains_with_a_server(trainer_models: Path, tmp_path: Path) -> None:
    _run(True, True, (3,), trainer_models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_grpo_trains_with_a_server_at_every_stage(adapted: bool, streams: bool, trainer_models: Path, tmp_path: Path) -> None:
    _run(adapted, streams, (0, 1, 2, 3), trainer_models, tmp_path)


def _run(adapted: bool, streams: bool, stages: tuple[int, ...], models: Path, folder: Path) -> None:
    with weight_server.serving(trainers.load(models, "llama")) as url:
        ports = [ranks._free_port() for _ in range(len(stages) + 1)]
        ranks.run_ranks(_same_as_ddp, 2, models, folder, adapted, streams, stages, url, ports, timeout=250)


def _same_as_ddp(models: Path, folder: Path, adapted: bool, streams: bool, stages: tuple[int, ...], url: str, ports: list[int]) -> None:
    with trainers.clean_state(), weight_server.vllm_over_gloo():
        expected: Any = None
        for stage, port in zip((None, *stages), ports, strict=True):
            trainers.forget()
            trainer = _grpo(models, folder / f"grpo{stage}", None if stage is None else trainers.zero_config(stage), adapted, url, port)
            _sends(trainer, streams and stage is not None, adapted)
            given = _watched(trainer, url)
            trainer.train()
            assert len(given) == (0 if stage is None else trl_runs.STEPS)
            if given:
                trainer.vllm_generation.sync_weights()  # the last step's
                assert any(not value.equal(given[0][name]) for name, value in given[-1].items())
            found = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history if "loss" in entry]
            assert len(found) == trl_runs.STEPS and all(LOGGED[-1] in entry for entry in found)
            if expected is None:
                expected = found
            else:
                trainers.assert_close(expected, found, f"stage {stage}", rel=1e-3)
            if trainer.accelerator.is_main_process:
                trainer.vllm_generation.vllm_client.close_communicator()


def _sends(trainer: Any, streams: bool, adapted: bool) -> None:
    """What TRL's walk over the parameters is replaced by: our stream, or copies.

    vLLM's sender keeps the tensors of a message until it is full or the walk is over; TRL takes merged adapters out again in place at
    the end of the walk. So the last message would be sent without them, with any engine.
    """
    from hf_zero.utils import iter_full_params

    generation = trainer.vllm_generation
    walk = generation._iter_named_params
    if streams:
        generation._iter_named_params = lambda: iter_full_params(trainer.model_wrapped)
    elif adapted:
        generation._iter_named_params = lambda: ((name, value.clone()) for name, value in walk())


def _watched(trainer: Any, url: str) -> list[Any]:
    """The weights of the trainer at each synchronization from now on, which the server must have after it."""
    from hf_zero.utils import iter_full_params

    generation, given = trainer.vllm_generation, []
    sync = generation.sync_weights

    def checked() -> None:
        watches = hasattr(trainer.model_wrapped, "global_steps")  # DDP has none
        if watches:
            given.append({name: value.clone() for name, value in iter_full_params(trainer.model_wrapped)})
        sync()
        if watches and trainer.accelerator.is_main_process:
            weight_server.assert_has(url, given[-1])

    generation.sync_weights = checked
    return given


def _grpo(models: Path, folder: Path, config: Any, adapted: bool, url: str, port: int) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = trl_runs.options(
        folder,
        config,
        GRPOConfig,
        num_generations=2,
        max_completion_length=5,
        learning_rate=1e-2,
        beta=0.1,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=port,
        generation_kwargs={"seed": 5},
    )
    return GRPOTrainer(
        model=trainers.load(models, "llama"),
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=args,
        train_dataset=trl_runs.pairs().select_columns(["prompt"]),
        processing_class=trl_runs.tokenizer(),
        peft_config=trl_runs.lora() if adapted else None,
    )
