import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from batches import batch_of, mixed_rollouts, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def batch():
    return batch_of(mixed_rollouts(np.random.default_rng(11)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gpu_computes_the_logprobs_and_the_step_of_the_cpu(architecture):
    on_cpu = trainer_of(tiny_model(architecture), logprob_chunk=50)
    on_gpu = trainer_of(tiny_model(architecture).to("cuda"), logprob_chunk=50)
    with torch.no_grad():
        expected, _ = on_cpu.token_logprobs(batch().microbatches[0])
        logprobs, _ = on_gpu.token_logprobs(batch().microbatches[0])
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=0, atol=1e-4)
    expected, metrics = on_cpu.step(batch()), on_gpu.step(batch())
    for name in ("loss", "grad_norm", "entropy", "kl_k3", "ratio_max", "clipped_share"):
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


def test_a_trainer_on_the_gpu_is_saved_and_restored(tmp_path):
    trainer = trainer_of(tiny_model("llama").to("cuda"))
    trainer.step(batch())
    trainer.save(tmp_path)
    drawn = torch.rand(3, device="cuda")
    resumed = trainer_of(tiny_model("llama").to("cuda"))
    resumed.model.load_state_dict(trainer.model.state_dict())
    resumed.restore(tmp_path)
    assert resumed.steps_done == 1
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert resumed.step(batch())["loss"] == pytest.approx(trainer.step(batch())["loss"], rel=1e-5)
