"""The peer of grpo_on_gpu.py: TRL's GRPOTrainer, with vLLM colocated if it is installed.

TRL gets its fastest settings: a whole step in one forward pass if it fits, no gradient
checkpointing, no KL model. As in Millrace, master weights are float32 and compute is 16-bit. TRL's
default, training in the bfloat16 of the checkpoint, would lose most of these updates.
"""

import importlib.util
from pathlib import Path
from typing import Any

from forced_lengths import force_lengths
from grpo_run import PROMPT_TOKENS, Measurement, Workload, sampled_gpu_memory
from trl_runs import grpo_settings, step_recorder

# Most sequences per forward and backward pass, unless --peer-sequences gives another number. A
# whole step of long ones does not fit.
MAX_SEQUENCES = {"short": 256, "long": 32, "forced": 32}


def measure_peer(workload: Workload, *, folder: Path, sequences: int | None) -> Measurement:
    """`sequences`: per forward and backward pass, at most."""
    use_vllm = workload.device == "cuda" and importlib.util.find_spec("vllm") is not None
    if workload.lengths == "forced" and not use_vllm:
        raise SystemExit("--peer --lengths forced needs a GPU and vLLM; run: pip install vllm")
    import trl
    from datasets import Dataset

    recorder = step_recorder()
    trainer = trl.GRPOTrainer(
        model=workload.model,
        args=_settings(workload, folder=folder, use_vllm=use_vllm, sequences=sequences),
        reward_funcs=workload.reward,
        train_dataset=Dataset.from_list(workload.tasks()),
        callbacks=[recorder],
        peft_config=_adapter(workload.lora),
    )
    if workload.lengths == "forced":
        force_lengths(trainer.vllm_generation.llm, workload.forced)
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


def _adapter(rank: int | None) -> Any:
    """The adapter of Millrace's [lora] table with this rank."""
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _settings(workload: Workload, *, folder: Path, use_vllm: bool, sequences: int | None) -> Any:
    per_step, limit = workload.samples_per_step, sequences or MAX_SEQUENCES[workload.lengths]
    sequences = next(n for n in range(limit, 0, -1) if per_step % n == 0)
    return grpo_settings(
        output_dir=str(folder),
        # In both libraries, weights beneath an adapter are frozen in 16 bits.
        model_init_kwargs={"dtype": workload.dtype if workload.lora else "float32"},
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
