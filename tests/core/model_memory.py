"""Measure one rank's own memory while a model is loaded and saved at stage 3; started once per rank, prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.memory import Peak, resident_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tiny", required=True, help="a small checkpoint of the same architecture: loads what is imported late")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    import hf_zero

    hf_zero.install_as_deepspeed()
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    torch.set_num_threads(1)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    kept = HfDeepSpeedConfig(config)  # alive, or transformers forgets it
    dist.init_process_group("gloo")
    AutoModelForCausalLM.from_pretrained(args.tiny)
    peak = Peak()
    report = {"base": resident_bytes()}
    model = AutoModelForCausalLM.from_pretrained(args.model)
    report["load"] = peak.value
    engine = hf_zero.initialize(model=model, config=config)[0]
    report["engine"] = resident_bytes()
    peak.restart()
    engine.save_16bit_model(args.output, max_shard_size="64MB")
    report["save"] = peak.value
    peak.restart()
    os.environ["HF_ZERO_SPILL_DIR"] = str(args.output / "spilled")
    state = engine._zero3_consolidated_16bit_state_dict()
    report["state_dict"] = peak.value
    report["entries"] = len(state) if state is not None else 0
    peak.close()
    report["spilled_files"] = len(list((args.output / "spilled").glob("*"))) if (args.output / "spilled").exists() else 0
    print("REPORT " + json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    assert kept is not None


if __name__ == "__main__":
    main()
