import json
import subprocess
import sys

import pytest
from tiny_model import make_tiny_model
from transformers import MambaConfig, MambaForCausalLM

from millrace.cli.main import main
from millrace.cluster.launchers.hosts import HostLauncher
from millrace.cluster.launchers.launcher import HostDevice, WorkerProcess
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.models.directory import num_weights
from millrace.run.execution.placement_report import cluster_lines, placement_lines
from millrace.run.execution.trainer_replica import count_sharing
from millrace.run.placement import (
    ELSEWHERE,
    GIB,
    OtherModel,
    PlacedProcess,
    check_broadcast,
    check_devices,
    check_memory,
    engine_index,
    idle_gpus,
    placed,
    placed_processes,
)
from millrace.run.train import describe_placement

CPU = HostDevice(name="cpu", kind="2 cores", total_bytes=2**35)


def host(num_gpus, *, total_bytes=2**37):
    gpus = [
        HostDevice(name=f"cuda:{i}", kind="GPU", total_bytes=total_bytes) for i in range(num_gpus)
    ]
    return (*gpus, CPU)


def where(table, num_gpus, models=()):
    """The device of each process."""
    devices = host(num_gpus)
    config = placed(load_config({"model": "m", **table}), devices=devices, models=models)
    processes = placed_processes(config, devices=devices, models=models)
    return {process.name: process.device for process in processes}


def test_without_a_gpu_and_with_one_all_processes_share_the_device():
    for num_gpus, device in ((0, "cpu"), (1, "cuda:0")):
        assert where({}, num_gpus) == {"trainer": device, "engine-0": device}
    config = load_config({"model": "m", "trainer": {"ranks": "auto"}})
    assert placed(config, devices=host(1)).placement == config.placement, "nothing to choose"


def test_engines_get_every_gpu_that_the_trainer_leaves():
    assert where({}, 4) == {
        "trainer": "cuda:0",
        "engine-0": "cuda:1",
        "engine-1": "cuda:2",
        "engine-2": "cuda:3",
    }
    assert where({"engine": {"count": 1}}, 4) == {"trainer": "cuda:0", "engine-0": "cuda:1"}
    both = where({"engine": {"count": 2}, "trainer": {"ranks": 2}}, 2)
    assert both == {
        "trainer-0": "cuda:0",
        "trainer-1": "cuda:1",
        "engine-0": "cuda:0",  # no GPU is left, so the engines use those of the trainer
        "engine-1": "cuda:1",
    }


def test_added_engines_come_after_the_evaluators():
    config = load_config(
        {"model": "m", "engine": {"count": 1, "remote": 2}, "evaluate": {"engines": 2}}
    )
    names = [*(f"engine-{i}" for i in range(5)), "evaluator-0", "evaluator-1"]
    found = {name: engine_index(config, name) for name in names}
    assert [name for name, index in found.items() if index is None] == ["engine-1", "engine-2"]
    here = {name: index for name, index in found.items() if index is not None}
    assert sorted(here, key=here.__getitem__) == [
        "engine-0",
        "evaluator-0",
        "evaluator-1",
        "engine-3",
        "engine-4",
    ]
    assert len({*here.values()}) == len(here)


def test_auto_ranks_take_half_of_the_gpus_and_more_if_the_model_needs_them(tmp_path):
    assert [
        sum(name.startswith("trainer") for name in where({"trainer": {"ranks": "auto"}}, n))
        for n in (0, 1, 2, 5, 8)
    ] == [1, 1, 1, 2, 4]
    in_pairs = {"trainer": {"ranks": "auto", "mesh": {"tp": 2}}}
    assert sum(name.startswith("trainer") for name in where(in_pairs, 7)) == 2
    path = str(make_tiny_model(tmp_path))
    small = host(8, total_bytes=16 * num_weights(path) // 4)
    config = placed(load_config({"model": path, "trainer": {"ranks": "auto"}}), devices=small)
    assert (config.trainer.ranks, config.engine.count) == (6, 2)  # with a fifth for activations
    table = {"model": path, "trainer": {"ranks": "auto"}, "optimizer": {"type": "adamw8bit"}}
    assert placed(load_config(table), devices=small).trainer.ranks == 4  # 10 bytes per weight
    table["critic"] = {}
    assert placed(load_config(table), devices=small).trainer.ranks == 7


def test_auto_ranks_leave_all_gpus_of_an_engine_and_of_evaluators():
    def ranks(num_gpus, tp=1, **engine):
        table = {"engine": {"type": "vllm", "tp": tp, **engine}, "trainer": {"ranks": "auto"}}
        table["evaluate"] = {"engines": 1 if tp == 1 else 0}
        found = where(table, num_gpus)
        return sum(name.startswith("trainer") for name in found), len({*found.values()})

    assert ranks(5, tp=4) == (1, 2)  # where() keeps one device of each engine
    assert ranks(3, count=2) == (1, 3)
    assert ranks(8, tp=2, count=3) == (2, 5)


def test_auto_ranks_take_all_gpus_if_engines_are_on_other_hosts():
    elsewhere = {"trainer": {"ranks": "auto"}, "engine": {"count": 0, "remote": 2}}
    found = where(elsewhere, 4)
    assert [name for name, device in found.items() if device == ELSEWHERE] == [
        "engine-0",
        "engine-1",
    ]
    assert sum(name.startswith("trainer") for name in found) == 4


def test_idle_gpus_are_named_with_the_settings_that_would_use_them():
    def idle(num_gpus, **table):
        devices = host(num_gpus)
        config = placed(load_config({"model": "m", **table}), devices=devices)
        return idle_gpus(config, placed_processes(config, devices=devices), devices)

    assert idle(0) == idle(1) == idle(4) == ()
    (sentence,) = idle(4, engine={"count": 0, "remote": 2})
    assert sentence.startswith(
        "cuda:1, cuda:2, cuda:3 are not used; raise engine.count or trainer.r"
    )
    (sentence,) = idle(2, placement={"trainer": "cuda:1", "engines": "cuda:1"})
    assert sentence.startswith("cuda:0 is not used; ")


def test_models_in_the_data_type_auto_are_float32_on_a_cpu(tmp_path):
    path = str(make_tiny_model(tmp_path))
    judge = OtherModel(name="judge", path=path, dtype="auto")
    for num_gpus, per_weight in ((0, 4), (1, 2)):
        config = placed(load_config({"model": path}), devices=host(num_gpus), models=[judge])
        processes = placed_processes(config, devices=host(num_gpus), models=[judge])
        sizes = {process.name: process.min_bytes for process in processes}
        expected = per_weight * num_weights(path)
        assert (sizes["judge-0"], sizes["engine-0"]) == (expected, expected)


def test_other_models_get_a_gpu_each_while_one_is_left_for_engines():
    models = [OtherModel(name=name, path="m", dtype="auto") for name in ("judge", "teacher")]
    assert where({}, 8, models)["judge-0"] == "cuda:7"
    assert where({}, 8, models)["teacher-0"] == "cuda:6"
    assert where({}, 3, models) == {
        "trainer": "cuda:0",
        "engine-0": "cuda:1",
        "judge-0": "cuda:2",
        "teacher-0": "cuda:2",
    }


def test_what_the_user_names_is_his_alone():
    named = {"placement": {"engines": ["cuda:0", "cuda:2"]}, "evaluate": {"engines": 1}}
    assert where(named, 4) == {
        "trainer": "cuda:1",
        "engine-0": "cuda:0",
        "evaluator-0": "cuda:2",
    }
    shared = {"placement": {"trainer": ["cuda:0", "cuda:0"]}, "trainer": {"ranks": "auto"}}
    assert where(shared, 2) == {
        "trainer-0": "cuda:0",
        "trainer-1": "cuda:0",
        "engine-0": "cuda:1",
    }
    with pytest.raises(ConfigError, match="ranks = 4 need a GPU each, and 3 of the 4 GPUs"):
        where({"trainer": {"ranks": 4}, "placement": {"engines": "cuda:0"}}, 4)


def test_ranks_share_a_device_if_they_are_on_the_same_one_of_the_same_host():
    def sharing(trainer, *joined, **cluster):
        config = load_config({"model": "m", "placement": {"trainer": trainer}, "cluster": cluster})
        ranks = [WorkerProcess() for _ in (*trainer, *joined)]
        for rank, (host, device) in zip(ranks[len(trainer) :], joined, strict=True):
            rank.host, rank.devices = host, (device,)
        return count_sharing(config, ranks)

    gpu, *_ = host(1)
    assert sharing(["cpu", "cpu"]) == [2, 2]
    assert sharing(["cuda:0", "cuda:1", "cuda:0"]) == [2, 1, 2]
    assert sharing(["cuda:0"], ("a", gpu), ("b", gpu), ("b", gpu)) == [1, 1, 2, 2]
    assert sharing(["cuda", "cuda"], launcher=f"{__name__}:Elsewhere") == [1, 1]


@pytest.mark.parametrize(
    ("table", "num_gpus", "sharing"),
    [
        ({}, 1, "trainer and engine-0 share cuda:0; set weights.transport to 'auto'"),
        ({"trainer": {"ranks": 2}}, 2, "trainer-0 and engine-0 share cuda:0; set"),
        ({"placement": {"engines": ["cuda:1", "cuda:1"]}, "engine": {"count": 2}}, 2, "engine-1"),
        (
            {"engine": {"count": 1}, "evaluate": {"engines": 1}, "placement": {"trainer": "cuda:0",
             "engines": ["cuda:1", "cuda:0"]}},
            2,
            "trainer and evaluator-0 share cuda:0",
        ),
        ({}, 2, None),
        ({}, 0, None),
        ({"engine": {"type": "vllm"}}, 1, None),  # servers get weights over gloo
        ({"evaluate": {"engines": 1}, "engine": {"count": 1}}, 2, None),
    ],
)  # fmt: skip
def test_a_broadcast_between_processes_that_share_a_gpu_is_refused(table, num_gpus, sharing):
    config = load_config({"model": "m", "weights": {"transport": "collective"}, **table})
    config = placed(config, devices=host(num_gpus))
    processes = placed_processes(config, devices=host(num_gpus))
    if sharing is None:
        check_broadcast(config, processes)
        return
    with pytest.raises(ConfigError, match="'collective' needs a GPU for each") as e:
        check_broadcast(config, processes)
    assert sharing in str(e.value)


def test_a_broadcast_to_other_hosts_needs_a_gpu_for_each_process_here():
    cluster = {"address": "tcp://127.0.0.1:0", "ticket": "ticket"}
    table = {"model": "m", "cluster": cluster, "engine": {"count": 1, "remote": 1}}
    config = placed(load_config(table), devices=host(1))
    processes = placed_processes(config, devices=host(1))
    with pytest.raises(ConfigError, match=r"'auto' \(with other hosts a broadcast\) needs a GPU"):
        check_broadcast(config, processes)
    check_broadcast(config, placed_processes(config, devices=host(1), trains=False))


def test_device_that_cannot_hold_its_processes_is_refused(tmp_path):
    path = str(make_tiny_model(tmp_path))
    table = {"model": path, "engine": {"dtype": "float32"}}
    needed = (16 + 4) * num_weights(path)  # AdamW in float32, and the engine's weights
    for total_bytes in (needed, needed - 1):
        devices = host(1, total_bytes=total_bytes)
        processes = placed_processes(placed(load_config(table), devices=devices), devices=devices)
        if total_bytes == needed:
            check_memory(processes, devices)
            continue
        with pytest.raises(ConfigError, match=r"'cuda:0' has .* \(trainer, engine-0\) need") as e:
            check_memory(processes, devices)
        assert "\n" not in str(e.value)
    (device, trainer, engine, *_) = placement_lines(processes, devices)
    assert device.startswith("cuda:0: GPU")
    assert trainer.split()[0] == "trainer"
    assert engine.endswith("GiB and the KV cache")


@pytest.mark.parametrize(("dtype", "per_weight"), [("bfloat16", 16), ("float32", 16)])
def test_device_holds_the_trainer_and_its_engines_in_turn_if_they_sleep(
    tmp_path, dtype, per_weight
):
    path = str(make_tiny_model(tmp_path))
    table = {
        "model": path,
        "engine": {"dtype": dtype},
        "evaluate": {"engines": 0},
        "cluster": {"share_gpu": "sleep"},
    }
    needed = per_weight * num_weights(path)
    devices = host(1, total_bytes=needed)
    processes = placed_processes(placed(load_config(table), devices=devices), devices=devices)
    check_memory(processes, devices)  # a step needs 16 bytes, and 12 are kept beside 2 or 4
    table["engine"]["count"] = 3
    processes = placed_processes(placed(load_config(table), devices=devices), devices=devices)
    if dtype == "float32":
        with pytest.raises(ConfigError, match="trainer, engine-0, engine-1, engine-2"):
            check_memory(processes, devices)


@pytest.mark.parametrize("has_attention", [True, False])
def test_dry_run_prints_the_placement_and_starts_nothing(tmp_path, capsys, has_attention):
    make_tiny_model(tmp_path / "model")  # with a tokenizer
    if not has_attention:
        mamba = MambaConfig(vocab_size=27, hidden_size=32, state_size=8, num_hidden_layers=1)
        MambaForCausalLM(mamba).save_pretrained(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 2", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        'model = "model"\nscorers = ["exact"]\n[tasks]\npath = "tasks.jsonl"\n'
        '[placement]\ntrainer = "cpu"\nengines = "cpu"\n'
    )
    run_dir = tmp_path / "run"
    settings = ["--run_dir", str(run_dir), "--engine.count", "2", "--engine.max_context", "64"]
    file = tmp_path / "placement.json"
    command = ["train", str(tmp_path / "run.toml"), "--dry-run", "--json", str(file), *settings]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("  ")] == [
        "trainer",
        "engine-0",
        "engine-1",
    ]
    assert "Nothing was started." in printed
    assert not run_dir.exists()
    found = json.loads(file.read_text())
    assert found["placement"] == {"trainer": ["cpu"], "engine-0": ["cpu"], "engine-1": ["cpu"]}
    assert [row["name"] for row in found["processes"]] == ["trainer", "engine-0", "engine-1"]
    total = sum(row["min_bytes"] for row in found["processes"])
    assert found["memory_bytes_per_device"] == {"cpu": total}
    assert total > 0


def test_a_placement_is_written_as_json_only_by_a_dry_run(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('model = "model"\n')
    assert main(["train", str(tmp_path / "run.toml"), "--json", str(tmp_path / "file")]) == 2
    assert "add --dry-run" in capsys.readouterr().err


def test_dry_run_says_what_an_adapter_trains(tmp_path, capsys):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 2", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        'model = "model"\nrun_dir = "run"\nscorers = ["exact"]\n[tasks]\npath = "tasks.jsonl"\n'
        '[placement]\ntrainer = "cpu"\nengines = "cpu"\n[lora]\nrank = 2\n'
        "[engine]\nmax_context = 64\n"
    )
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "LoRA of rank 2 adapts 14 linear layers; it has 2,048 weights." in lines


def test_dry_run_names_a_context_that_ends_before_the_stated_one(tmp_path, capsys):
    make_tiny_model(tmp_path / "model")
    saved = tmp_path / "model" / "config.json"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    scaling["original_max_position_embeddings"] = 64
    config = {**json.loads(saved.read_text()), "rope_parameters": scaling}
    saved.write_text(json.dumps(config))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 2", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        'model = "model"\nrun_dir = "run"\nscorers = ["exact"]\n[tasks]\npath = "tasks.jsonl"\n'
        '[placement]\ntrainer = "cpu"\nengines = "cpu"\n'
    )
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    begin = "Sequences end at 64 tokens (engine.max_context), not at the 128 that"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(begin)]


class Elsewhere(HostLauncher):
    """A launcher that starts nothing."""


def test_dry_run_with_another_launcher_prints_what_each_role_requests(tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 2", "answer": "2"}\n')
    settings = {
        "model": str(tmp_path / "model"),
        "scorers": ["exact", {"type": "reference", "model": str(tmp_path / "model")}],
        "tasks": {"path": str(tmp_path / "tasks.jsonl")},
        "cluster": {"launcher": f"{__name__}:Elsewhere"},
        "placement": {"trainer": "cuda", "engines": "cpu"},
        "engine": {"count": 2, "dtype": "float32"},
        "loss": {"type": "grpo", "kl": 0.1},
        "trainer": {"ranks": 2},
        "environment": {"function": "asyncio:sleep", "workers": 1, "remote": 4},
    }
    shown = describe_placement(load_config(settings)).splitlines()
    assert shown[2:5] == [
        "  trainer                 2     1     1     0.0 GiB and activations",
        "  engine                  2     1     0     0.0 GiB and the KV cache",
        "  environment             4     1     0",
    ]
    assert shown[7].split()[0] == "reference-0"
    assert shown[8].startswith("Beside them on the CPU: the controller, 2 scorer processes, 1 env")


def test_engine_on_several_gpus_is_listed_once_with_all_of_them():
    config = load_config({"model": "m", "cluster": {"launcher": "ray", "threads": 3}})
    engines = [
        PlacedProcess(name=f"engine-{i // 2}", device="cuda", min_bytes=GIB, more="and KV")
        for i in range(6)
    ]
    (_, _, line) = cluster_lines(config, engines)
    assert line.split() == ["engine", "3", "3", "2", "1.0", "GiB", "and", "KV"]


def test_with_another_launcher_only_models_of_scorers_must_find_their_gpu_on_this_host():
    def resolve(device):
        if device == "cuda:9":
            raise ConfigError("Device 'cuda:9' does not exist.")

    def check(**models):
        table = {"model": "m", "cluster": {"launcher": "ray"}, "placement": {"models": models}}
        roles = {"function": "m:f", "models": {"judge": {"path": "j"}}}
        check_devices(load_config({**table, "environment": roles}), resolve)

    check(judge="cuda:9", quality="cuda:0")
    with pytest.raises(ConfigError, match=r"placement.models.quality = 'cuda:9': Device 'cuda:9' "):
        check(quality="cuda:9")


def test_ranks_and_engines_that_join_are_listed_apart_and_take_no_gpu_here():
    table = {"trainer": {"ranks": 4, "remote": 2}, "engine": {"remote": 1}}
    assert where(table, 4) == {
        "trainer-0": "cuda:0",
        "trainer-1": "cuda:1",
        "trainer-2": ELSEWHERE,
        "trainer-3": ELSEWHERE,
        "engine-0": "cuda:2",
        "engine-1": "cuda:3",
        "engine-2": ELSEWHERE,
    }
    config = placed(load_config({"model": "m", **table}), devices=host(4))
    assert config.placement.trainer == ("cuda:0", "cuda:1")
    lines = list(placement_lines(placed_processes(config, devices=host(4)), host(4)))
    assert lines[-4] == "other hosts, which choose the devices when they join:"
    assert [line.split()[0] for line in lines[-3:]] == ["trainer-2", "trainer-3", "engine-2"]


def test_engines_with_tensor_parallelism_have_whole_sets_of_gpus():
    def gpus_of(num_gpus, engines="auto", **engine):
        table = {"engine": {"type": "vllm", "tp": 2, **engine}, "placement": {"engines": engines}}
        devices = host(num_gpus)
        config = placed(load_config({"model": "m", **table}), devices=devices)
        processes = placed_processes(config, devices=devices)
        return [(p.name, p.device) for p in processes if p.name != "trainer"]

    with_a_gap = [("engine-0", "cuda:0"), ("engine-0", "cuda:2")]
    assert gpus_of(4, ["cuda:0", "cuda:2"]) == with_a_gap
    in_order = [("engine-0", "cuda:3"), ("engine-0", "cuda:0"), ("engine-1", "cuda:1")]
    both = gpus_of(5, ["cuda:3", "cuda:0", "cuda:1", "cuda:4"], count=2)
    assert both == [*in_order, ("engine-1", "cuda:4")]
    assert gpus_of(4) == [("engine-0", "cuda:1"), ("engine-0", "cuda:2")], "one GPU is left over"
    with pytest.raises(ConfigError, match=r"2 different GPUs, and placement\.engines is cuda:0;"):
        gpus_of(4, "cuda:0")
    with pytest.raises(ConfigError, match="is cuda:0, cuda:1, cuda:2; list 2 of them for each"):
        gpus_of(4, ["cuda:0", "cuda:1", "cuda:2"], count=1)
    with pytest.raises(ConfigError, match=r"different GPUs, .* is cuda:1, cuda:1; list 2"):
        gpus_of(4, ["cuda:1", "cuda:1"])
    with pytest.raises(
        ConfigError, match=r"tp = 2 needs 2 GPUs for each engine, and PyTorch sees 1"
    ):
        gpus_of(1)


def test_engines_of_attached_servers_need_no_gpu(tmp_path):
    servers = {"type": "vllm", "tp": 2, "options": {"attach": ["http://a", "http://b"]}}
    on_cpu = {"engine-0": "cpu", "engine-1": "cpu"}
    assert where({"engine": servers}, 1) == {"trainer": "cuda:0", **on_cpu}
    all_ranks = {f"trainer-{i}": f"cuda:{i}" for i in range(4)}
    assert where({"engine": servers, "trainer": {"ranks": "auto"}}, 4) == {**all_ranks, **on_cpu}
    path = str(make_tiny_model(tmp_path))
    devices = host(1, total_bytes=16 * num_weights(path))  # for the trainer alone
    config = placed(load_config({"model": path, "engine": servers}), devices=devices)
    processes = placed_processes(config, devices=devices)
    check_memory(processes, devices)
    assert list(placement_lines(processes, devices))[-1].endswith("passes requests to its server")


def test_models_with_tensor_parallelism_have_whole_sets_of_gpus():
    judge = OtherModel(name="judge", path="m", dtype="auto", tp=2)
    devices = host(6)
    config = placed(load_config({"model": "m"}), devices=devices, models=[judge])
    processes = placed_processes(config, devices=devices, models=[judge])
    assert [p.device for p in processes if p.name == "judge-0"] == ["cuda:5", "cuda:4"]


def test_controller_imports_no_code_of_models(model, tmp_path):
    """Importing it takes seconds, and only workers need it."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    settings = {"model": str(model), "tasks": {"path": str(tmp_path / "tasks.jsonl")}}
    code = f"""
import sys
from millrace.config import load_config
from millrace.run.train import describe_placement
print(describe_placement(load_config({{**{settings!r}, "scorers": ["exact"]}})))
print([name for name in sys.modules if name in ("millrace.models.loading", "torch._dynamo")])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trainer" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "[]"
