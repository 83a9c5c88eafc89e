import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.models import devices
from millrace.models.devices import ModelSize, check_free_memory, kept_bytes, rank_bytes
from millrace.models.directory import num_weights


def config_of(path="m", **sections):
    return load_config({"model": str(path), **sections})


def test_weights_are_counted_without_loading_them(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "one"))
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert (tmp_path / "several" / "model.safetensors.index.json").is_file()
    number = sum(parameter.numel() for parameter in model.parameters())
    assert num_weights(str(tmp_path / "one")) == num_weights(str(tmp_path / "several")) == number
    assert num_weights(str(tmp_path)) == num_weights("/nowhere/model") == 0


@pytest.mark.parametrize(
    ("sections", "per_weight"),
    [
        ({}, 16),  # float32 weights, gradients and two moments
        ({"optimizer": {"type": "torch.optim:SGD"}}, 8),
        ({"optimizer": {"type": "muon"}}, 12),
        ({"optimizer": {"type": "adamw8bit"}}, 10),
        ({"optimizer": {"offload": True}}, 8),
        ({"lora": {}, "trainer": {"dtype": "float32"}}, 4),
        ({"lora": {"dora": True}, "trainer": {"dtype": "bfloat16"}}, 4),
        ({"lora": {}, "trainer": {"dtype": "bfloat16", "ranks": 2}}, 1),
        ({"trainer": {"ranks": 4}}, 4),
        ({"trainer": {"ranks": 4, "mesh": {"dp_replicate": 2}}}, 8),
    ],
)
def test_ranks_share_the_state_except_for_replicas(sections, per_weight):
    size = ModelSize(num_weights=1000)
    assert rank_bytes(config_of(**sections), size) == 1000 * per_weight


def test_matrices_in_nf4_take_17_bits_for_four_weights_and_tables_stay_float32():
    size = ModelSize(num_weights=3300, num_outside=100, linear_factors=10)
    config = config_of(lora={"quantization": "nf4"}, trainer={"dtype": "bfloat16"})
    assert rank_bytes(config, size) == 3200 * 17 // 32 + 100 * 4 + 10 * 16


def test_trainer_keeps_everything_but_gradients_between_two_steps():
    lora = config_of(lora={}, trainer={"dtype": "bfloat16"})
    size = ModelSize(num_weights=1000, linear_factors=10)
    assert rank_bytes(config_of(), size, in_step=False) == 12_000
    assert rank_bytes(lora, size, in_step=False) == 2000 + 10 * 12


def test_ranks_share_a_critic_and_adapters_of_experts_but_not_those_of_linear_layers():
    size = ModelSize(num_weights=1000, num_outside=100, linear_factors=10, expert_factors=40)
    lora = {"lora": {}, "trainer": {"dtype": "bfloat16", "ranks": 2}}
    assert rank_bytes(config_of(**lora), size) == (900 * 2 + 100 * 4 + 40 * 16) // 2 + 10 * 16
    lora["trainer"]["mesh"] = {"tp": 2}
    assert rank_bytes(config_of(**lora), size) == (900 * 2 + 100 * 4 + 40 * 16) // 2 + 5 * 16
    critic = ModelSize(num_weights=1000, critic=500)
    assert rank_bytes(config_of(critic={}, trainer={"ranks": 2}), critic) == 1500 * 16 // 2


def test_rank_that_exceeds_the_free_memory_is_refused_before_it_loads(tmp_path, monkeypatch):
    config, device = config_of(make_tiny_model(tmp_path)), torch.device("cuda:0")
    needed = rank_bytes(config, ModelSize.read(config))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed, 2**30))
    check_free_memory(config, device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - 1, 2**30))
    with pytest.raises(ConfigError, match=r"cuda:0 has 0\.0 of 1\.0 GiB free; stop what else"):
        check_free_memory(config, device, patience_s=0.0)
    freed = iter([needed - 1, needed])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(freed), 2**30))
    check_free_memory(config, device)  # the memory of a killed process is freed a little later
    sleeping = config_of(tmp_path, cluster={"share_gpu": "sleep"})
    check_free_memory(sleeping, device)


def test_ranks_that_share_a_device_need_its_memory_together(tmp_path, monkeypatch):
    config = config_of(make_tiny_model(tmp_path), trainer={"ranks": 2})
    of_both = 2 * rank_bytes(config, ModelSize.read(config))
    for device in (torch.device("cpu"), torch.device("cuda:0")):
        monkeypatch.setattr(devices, "memory_of", lambda _: (of_both, 2**30))
        check_free_memory(config, device, num_ranks=2)
        monkeypatch.setattr(devices, "memory_of", lambda _: (of_both - 1, 2**30))
        check_free_memory(config, device)  # the other rank has a device of its own
        with pytest.raises(ConfigError, match=r"^2 ranks of the trainer need 0\.0 GiB for weights"):
            check_free_memory(config, device, num_ranks=2, patience_s=0.0)


def test_rank_on_a_cpu_is_compared_with_the_memory_that_is_available(tmp_path, monkeypatch):
    config, cpu = config_of(make_tiny_model(tmp_path)), torch.device("cpu")
    free, total = devices.memory_of(cpu)
    assert 0 < free < total
    check_free_memory(config, cpu)
    monkeypatch.setattr(devices, "memory_of", lambda _: (100, total))
    with pytest.raises(ConfigError, match=r"and cpu has 0\.0 of \d+\.\d GiB free; stop what else"):
        check_free_memory(config, cpu, patience_s=0.0)


def test_only_an_engine_that_sleeps_on_the_trainers_device_counts_what_the_trainer_keeps(tmp_path):
    model = make_tiny_model(tmp_path)
    kept = 12 * num_weights(str(model))
    assert kept_bytes(config_of(model, cluster={"share_gpu": "sleep"})) == kept
    assert kept_bytes(config_of(model, cluster={"share_gpu": "take_turns"})) == 0
    elsewhere = {"trainer": "cuda:0", "engines": "cuda:1"}
    assert kept_bytes(config_of(model, cluster={"share_gpu": "sleep"}, placement=elsewhere)) == 0
