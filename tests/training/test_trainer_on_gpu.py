import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, HYBRIDS, RECURRENT, tiny_model
from batches import batch_of, mixed_rollouts, random_rollout, sharing_rollouts, trainer_of
from critics import critic_batch, critic_of
from safetensors.torch import load_file

from millrace.training.checkpoints.snapshot import STATE_FILE
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.surrogates import Reinforce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def batch():
    return batch_of(mixed_rollouts(np.random.default_rng(11)))


def sharing_batch(prompt: int):
    return batch_of(sharing_rollouts(np.random.default_rng(11), prompt=prompt, sampled=40))


OTHERS = ("gpt_oss", "llama4", "deepseek_v2", "phimoe")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *OTHERS, *RECURRENT, *HYBRIDS])
def test_the_gpu_computes_the_logprobs_and_the_step_of_the_cpu(architecture):
    on_cpu = trainer_of(tiny_model(architecture), logprob_chunk=50)
    on_gpu = trainer_of(tiny_model(architecture).to("cuda"), logprob_chunk=50)
    with torch.no_grad():
        expected = on_cpu.policy.logprobs(batch().microbatches[0]).logprobs
        logprobs = on_gpu.policy.logprobs(batch().microbatches[0]).logprobs
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=0, atol=1e-4)
    expected, metrics = on_cpu.step(batch()), on_gpu.step(batch())
    for name in ("loss", "grad_norm", "entropy", "mismatch/kl_k3", "ratio/max", "clip_ratio"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_bfloat16_steps_run_on_the_gpu(gradient_checkpointing):
    trainer = trainer_of(
        tiny_model("qwen3").to("cuda"),
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=gradient_checkpointing,
    )
    exact = trainer_of(tiny_model("qwen3").to("cuda"))
    metrics, expected = trainer.step(batch()), exact.step(batch())
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.05)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2)


@pytest.mark.parametrize("prompt", [9, 150])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_flash_path_gives_the_step_of_the_cpu_with_shared_prefixes(architecture, prompt):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which a fall back to blocks would be
        on_gpu = trainer_of(tiny_model(architecture).to("cuda"), compute_dtype=torch.bfloat16)
        metrics = on_gpu.step(sharing_batch(prompt))
    expected = trainer_of(tiny_model(architecture)).step(sharing_batch(prompt))
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.02)
    assert metrics["mismatch/kl_k1"] == pytest.approx(expected["mismatch/kl_k1"], abs=0.05)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "gpt_oss"])
def test_unsupported_attention_falls_back_from_the_flash_kernel_with_a_warning(architecture):
    on_gpu = trainer_of(tiny_model(architecture).to("cuda"), compute_dtype=torch.bfloat16)
    metrics = on_gpu.step(sharing_batch(9))
    expected = trainer_of(tiny_model(architecture)).step(sharing_batch(9))
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.02)


def test_a_trainer_on_the_gpu_is_saved_and_restored(tmp_path):
    trainer = trainer_of(tiny_model("llama").to("cuda"))
    trainer.step(batch())
    trainer.snapshot().write(tmp_path)
    drawn = torch.rand(3, device="cuda")
    resumed = trainer_of(tiny_model("llama").to("cuda"))
    resumed.policy.module.load_state_dict(trainer.policy.module.state_dict())
    resumed.restore(tmp_path)
    assert resumed.steps_done == 1
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert resumed.step(batch())["loss"] == pytest.approx(trainer.step(batch())["loss"], rel=1e-5)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_compiled_layers_on_the_gpu_give_the_same_steps(gradient_checkpointing):
    # A clipped loss has no gradient beyond its bounds, and rounding moves tokens across them.
    loss = PolicyLoss(surrogate=Reinforce())
    settings = {"compute_dtype": torch.bfloat16, "logprob_chunk": 16, "loss": loss}
    compiled = trainer_of(
        tiny_model("qwen3").to("cuda"),
        compile_layers=True,
        gradient_checkpointing=gradient_checkpointing,
        **settings,
    )
    plain = trainer_of(tiny_model("qwen3").to("cuda"), **settings)
    for make in (batch, lambda: sharing_batch(9), lambda: sharing_batch(150)):
        ours, theirs = compiled.step(make()), plain.step(make())
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.02)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)


def test_a_microbatch_over_the_gpus_memory_is_split_and_training_continues():
    model = tiny_model("qwen3").to("cuda")
    trainer = trainer_of(model, compute_dtype=torch.bfloat16)
    rng = np.random.default_rng(1)
    rollouts = [random_rollout(rng, prompt=10, sampled=200) for _ in range(64)]
    whole = batch_of(rollouts, microbatch_tokens=10**6)
    expected = trainer_of(tiny_model("qwen3").to("cuda"), compute_dtype=torch.bfloat16).step(whole)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 24 * 2**20
    try:
        # What one forward and backward pass of all takes is several times this.
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
        metrics = trainer.step(whole)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert metrics["batch/microbatch_splits"] >= 1
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_critic_on_the_gpu_makes_the_step_of_the_cpu(dtype):
    rollouts = sharing_rollouts(np.random.default_rng(11), prompt=40, sampled=40)
    step = critic_batch(rollouts)
    expected = trainer_of(tiny_model("qwen3"), critic=critic_of()).step(step)
    critic = critic_of(device="cuda", compute_dtype=dtype)
    trainer = trainer_of(tiny_model("qwen3").to("cuda"), critic=critic, compute_dtype=dtype)
    metrics = trainer.step(step)
    tolerance = {"rel": 1e-3, "abs": 1e-4} if dtype is torch.float32 else {"rel": 0.1, "abs": 0.05}
    for name in (
        "critic/value_mean",
        "critic/return_mean",
        "critic/loss",
        "critic/grad_norm",
        "loss",
    ):
        assert metrics[name] == pytest.approx(expected[name], **tolerance), name
    before = metrics["critic/loss"]
    for _ in range(10):
        metrics = trainer.step(step)
    assert metrics["critic/loss"] < before


def test_a_checkpoint_written_during_later_steps_holds_its_own_weights_and_moments(tmp_path):
    trainer = trainer_of(tiny_model("qwen3").to("cuda"))
    trainer.step(batch())
    torch.cuda._sleep(10**8)  # so that the next step is still queued when the copy is asked for
    trainer.step(batch())
    weights = {name: value.clone() for name, value in trainer.policy.module.state_dict().items()}
    moments = copy.deepcopy(trainer.policy.optimizer_state()["state"])
    snapshot = trainer.snapshot()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(snapshot.write, tmp_path)
        for _ in range(5):
            trainer.step(batch())
        writing.result()
    written = load_file(tmp_path / "model.safetensors")
    for name, value in written.items():
        torch.testing.assert_close(value, weights[name].cpu(), rtol=0, atol=0, msg=name)
        assert not torch.equal(value, trainer.policy.module.state_dict()[name].cpu()), name
    state = torch.load(tmp_path / STATE_FILE, weights_only=True)
    assert state["steps_done"] == 2
    for number, of_parameter in state["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            expected = moments[number][name].cpu()
            torch.testing.assert_close(of_parameter[name], expected, rtol=0, atol=0, msg=name)
