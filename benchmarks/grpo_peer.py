"""The peer of grpo_on_gpu.py: TRL's GRPOTrainer, with vLLM colocated if it is installed.

TRL gets its fastest settings: a whole step in one forward pass if it fits, no gradient
checkpointing, no KL model. As in Millrace, master weights are float32 and compute is 16-bit. TRL's
default, training in the bfloat16 of the checkpoint, would lose most of these updates.
"""

import importlib.util
from pathlib import Path
from typing import Any

from grpo_run import PROMPT_TOKENS, Measurement, Workload, sampled_gpu_memory
from sums import exact_sum
from trl_runs import grpo_settings, step_recorder

# Most sequences per forward and backward pass. A whole step of long ones does not fit.
MAX_SEQUENCES = {"short": 256, "long": 32}


def measure_peer(workload: Workload, *, folder: Path) -> Measurement:
    import trl
    from datasets import Dataset

    use_vllm = workload.device == "cuda" and importlib.util.find_spec("vllm") is not None
    recorder = step_recorder()
    trainer = trl.GRPOTrainer(
        model=workload.model,
        args=_settings(workload, folder=folder, use_vllm=use_vllm),
        reward_funcs=exact_sum,
        train_dataset=Dataset.from_list(workload.tasks()),
        callbacks=[recorder],
    )
    with sampled_gpu_memory(workload.device) as used:
        trainer.train()
    logs = recorder.logs
    clipped = [row["completions/clipped_ratio"] for row in logs]
    mismatch = "sampling/sampling_logp_difference/mean"  # logged with vLLM only
    return Measurement(
        name=f"TRL {trl.__version__}, {_generation(use_vllm)}",
        samples_per_step=workload.samples_per_step,
        times_s=recorder.times_s,
        rewards=[row["reward"] for row in logs],
        mean_lengths=[row["completions/mean_length"] for row in logs],
        mismatches=[row[mismatch] for row in logs if mismatch in row],
        ended_share=1 - sum(clipped) / len(clipped),
        peak_gpu_bytes=max(used, default=None),
        notes={"learning_rate": workload.learning_rate},
    )


def _settings(workload: Workload, *, folder: Path, use_vllm: bool) -> Any:
    per_step = workload.samples_per_step
    sequences = next(n for n in range(MAX_SEQUENCES[workload.lengths], 0, -1) if per_step % n == 0)
    return grpo_settings(
        output_dir=str(folder),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=workload.device == "cpu",
        bf16=workload.dtype == "bfloat16",
        fp16=workload.dtype == "float16",
        max_steps=workload.steps,
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=per_step // sequences,
        num_generations=workload.group,
        max_completion_length=workload.max_new_tokens,
        use_vllm=use_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=PROMPT_TOKENS + workload.max_new_tokens,
        learning_rate=workload.learning_rate,
        seed=workload.seed,
    )


def _generation(use_vllm: bool) -> str:
    if not use_vllm:
        return "transformers generation"
    from importlib.metadata import version

    return f"vLLM {version('vllm')} colocated"
