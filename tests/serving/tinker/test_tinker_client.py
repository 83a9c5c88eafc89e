"""The official Tinker client, unmodified, against `millrace serve --train`.

`make test-tinker` installs the client in an environment of its own.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import make_chat_model
from forked_command import start_command

types = pytest.importorskip("tinker.types", reason="make test-tinker installs it")
import tinker  # noqa: E402

from millrace.serving.tinker.tenants import MAX_SESSIONS  # noqa: E402

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[3] / "docs/how-to/training-api.md"
KEYS = ("tml-one", "tml-two", "tml-three")
NAME = "my-model"  # as in the guide
TEXT = "hello world, hello sea"
ADAM = types.AdamParams(learning_rate=0.02, grad_clip_norm=10.0)
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)
ROUNDING = 1e-6  # another process may add in another order


@contextmanager
def training_server(folder: Path, *, port: int = 0) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server on the model and the states in `folder`, killed at the end."""
    (folder / "keys").write_text("\n".join(KEYS))
    command = ["serve", str(folder / "model")]
    command += ["--train", "--train-dir", str(folder / "states"), "--name", NAME]
    command += ["--port", str(port)]
    command += ["--api-key-file", str(folder / "keys"), "--log-dir", str(folder / "logs")]
    command += ["--placement.engines", "cpu", "--cluster.threads=1"]
    process = start_command(*command)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found
        yield found[0], process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    make_chat_model(folder / "model")
    with training_server(folder) as (url, _):
        yield url


@pytest.fixture
def client(server: str) -> Any:
    return tinker.ServiceClient(base_url=server, api_key=KEYS[0])


def datum_of(text: str = TEXT, **inputs: Any) -> Any:
    tokens = [*map(ord, text)]
    inputs = inputs or {"weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )


def train(model: Any, *, steps: int, data: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = model.forward_backward(data or [datum_of()], "cross_entropy")
        stepped = model.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def greedy(sampler: Any) -> tuple[list[int], list[float]]:
    prompt = types.ModelInput.from_ints([*map(ord, TEXT[:6])])
    (sequence,) = sampler.sample(prompt, 1, GREEDY).result().sequences
    return list(sequence.tokens), list(sequence.logprobs)


def same(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
    """Up to rounding, which depends on how many tokens the engine computed in one pass."""
    return one[0] == other[0] and np.allclose(one[1], other[1], rtol=0, atol=1e-5)


def test_the_loss_falls(client: Any):
    assert client.get_server_capabilities().supported_models[0].model_name == NAME
    model = client.create_lora_training_client(base_model=NAME, rank=8, seed=3)
    assert model.get_info().lora_rank == 8
    assert model.get_tokenizer().encode("ab") == [97, 98]
    losses = train(model, steps=20)
    assert losses[-1] < losses[0] - 3


def test_a_client_beyond_the_limit_of_sessions_learns_it_at_once(server: str):
    def open_session() -> int:
        headers = {"X-API-Key": KEYS[2], "Content-Type": "application/json"}
        request = urllib.request.Request(f"{server}/api/v1/create_session", b"{}", headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    for _ in range(MAX_SESSIONS):
        assert open_session() == 200
    assert open_session() == 429
    surplus = tinker.ServiceClient(base_url=server, api_key=KEYS[2])
    with pytest.raises(tinker.RateLimitError, match="close other clients"):
        surplus.create_lora_training_client(base_model=NAME, rank=4)


def test_samples_come_from_the_weights_that_were_saved_for_them(client: Any):
    model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
    before = greedy(client.create_sampling_client(base_model=NAME))
    assert greedy(model.save_weights_and_get_sampling_client())[0] == before[0]  # B is 0
    train(model, steps=15)
    early = model.save_weights_and_get_sampling_client()
    first = greedy(early)
    assert not same(first, before)
    train(model, steps=15)
    path = model.save_weights_for_sampler("later").result().path
    later = client.create_sampling_client(model_path=path)
    second = greedy(later)
    assert not same(second, first)
    # More adapters than the engine holds: each sampler keeps its own weights.
    others = [model.save_weights_and_get_sampling_client() for _ in range(4)]
    assert all(same(greedy(other), second) for other in others)
    assert same(greedy(early), first)
    assert same(greedy(client.create_sampling_client(base_model=NAME)), before)

    # The engine's logprobs are the trainer's.
    tokens, logprobs = second
    whole = [*map(ord, TEXT[:6]), *tokens]
    scored = later.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[6:], logprobs, atol=1e-4)
    targets = np.array(whole[1:])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": np.ones(len(targets), np.float32)},
    )
    (output,) = model.forward([datum], "cross_entropy").result().loss_fn_outputs
    np.testing.assert_allclose(output["logprobs"].to_numpy()[5:], logprobs, atol=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_policy_losses_raise_the_logprobs_of_good_tokens(client: Any, loss: str):
    model = client.create_lora_training_client(base_model=NAME, rank=8, seed=5)
    data = [datum_of()]
    (output,) = model.forward(data, "cross_entropy").result().loss_fn_outputs
    sampled = output["logprobs"].to_numpy()
    advantages = np.ones(len(sampled), np.float32)
    policy = [datum_of(logprobs=sampled, advantages=advantages)]
    for _ in range(5):
        model.forward_backward(policy, loss).result()
        model.optim_step(ADAM).result()
    (output,) = model.forward(data, "cross_entropy").result().loss_fn_outputs
    assert output["logprobs"].to_numpy().sum() > sampled.sum() + 0.2


def test_a_custom_loss_trains_like_the_same_loss_on_the_server(client: Any):
    def negative_sum(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {"num": float(len(data))}

    custom = client.create_lora_training_client(base_model=NAME, rank=4, seed=7)
    server_side = client.create_lora_training_client(base_model=NAME, rank=4, seed=7)
    for _ in range(3):
        result = custom.forward_backward_custom([datum_of()], negative_sum).result()
        assert result.metrics["num"] == 1.0
        custom.optim_step(ADAM).result()
    train(server_side, steps=3)
    losses = [
        each.forward([datum_of()], "cross_entropy").result().metrics["loss:sum"]
        for each in (custom, server_side)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_many_data_are_sent_in_chunks(client: Any):
    model = client.create_lora_training_client(base_model=NAME, rank=4)
    result = model.forward_backward([datum_of()] * 1500, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1500


def test_tenants_do_not_see_each_other(server: str, client: Any):
    model = client.create_lora_training_client(base_model=NAME, rank=4)
    path = model.save_state("mine").result().path
    other = tinker.ServiceClient(base_url=server, api_key=KEYS[1])
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(path)
    with pytest.raises(tinker.NotFoundError):
        other.create_sampling_client(model_path=path)
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server, api_key="tml-unknown").get_server_capabilities()
    assert client.create_training_client_from_state(path).get_info().lora_rank == 4


def test_the_client_lists_and_deletes_states(server: str):
    client = tinker.ServiceClient(base_url=server, api_key=KEYS[1])
    model = client.create_lora_training_client(base_model=NAME, rank=4)
    path = model.save_state("kept", ttl_seconds=1000).result().path
    removed = model.save_weights_for_sampler("removed").result().path
    rest = tinker.RestClient(base_url=server, api_key=KEYS[1])
    (run,) = rest.list_training_runs().result().training_runs
    assert (run.training_run_id, run.lora_rank, run.base_model) == (model.model_id, 4, NAME)
    assert rest.get_training_run_by_tinker_path(path).result().last_checkpoint.tinker_path == path
    found = rest.list_checkpoints(model.model_id).result().checkpoints
    assert {(each.tinker_path, each.checkpoint_type) for each in found} == {
        (path, "training"),
        (removed, "sampler"),
    }
    rest.delete_checkpoint_from_tinker_path(removed).result()
    (left,) = rest.list_user_checkpoints().result().checkpoints
    assert left.tinker_path == path
    assert left.expires_at is not None
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path=removed)


def test_weights_that_are_saved_again_under_a_name_are_sampled(server: str, client: Any):
    model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
    path = model.save_weights_for_sampler("name").result().path
    sampler = client.create_sampling_client(model_path=path)
    before = greedy(sampler)
    train(model, steps=20)
    rest = tinker.RestClient(base_url=server, api_key=KEYS[0])
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert model.save_weights_for_sampler("name").result().path == path
    after = greedy(client.create_sampling_client(model_path=path))
    assert not same(after, before)
    assert same(after, greedy(model.save_weights_and_get_sampling_client()))


def test_errors_name_the_mistake(client: Any):
    with pytest.raises(tinker.BadRequestError, match="this server has my-model"):
        client.create_lora_training_client(base_model="large", rank=4)
    model = client.create_lora_training_client(base_model=NAME, rank=4)
    with pytest.raises(tinker.RequestFailedError, match="'dro' is unknown"):
        model.forward([datum_of()], "dro").result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        model.optim_step(ADAM).result()


def test_training_continues_with_equal_losses_after_kill_9(tmp_path: Path):
    make_chat_model(tmp_path / "model")
    with training_server(tmp_path) as (url, _):
        client = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
        model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
        train(model, steps=3)
        path = model.save_state("state").result().path
        expected = train(model, steps=3)
    with training_server(tmp_path) as (url, _):
        client = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
        resumed = client.create_training_client_from_state_with_optimizer(path)
        assert train(resumed, steps=3) == pytest.approx(expected, rel=ROUNDING)


def test_a_client_and_its_models_outlive_the_server(tmp_path: Path):
    make_chat_model(tmp_path / "model")
    with training_server(tmp_path) as (url, _):
        client = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
        model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
        expected = train(model, steps=6)
        sampled = greedy(model.save_weights_and_get_sampling_client())
    port = int(url.rpartition(":")[2])
    with training_server(tmp_path, port=port) as (url, _):
        client = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
        model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
        sampler = model.save_weights_and_get_sampling_client()
        base = greedy(sampler)
        losses = train(model, steps=2)
        passed = model.forward_backward([datum_of()], "cross_entropy")
    with training_server(tmp_path, port=port):
        stepped = model.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        losses += train(model, steps=1)
        stepped = [model.forward_backward([datum_of()], "cross_entropy"), model.optim_step(ADAM)]
    with training_server(tmp_path, port=port):
        losses.append(stepped[0].result().metrics["loss:sum"])
        losses += train(model, steps=1)
        assert losses == pytest.approx(expected, rel=ROUNDING)
        assert same(greedy(sampler), base)
        assert same(greedy(model.save_weights_and_get_sampling_client()), sampled)


def test_the_script_of_the_guide_runs(server: str):
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    environment = {**os.environ, "TINKER_BASE_URL": server, "TINKER_API_KEY": KEYS[0]}
    # Threads of the client may abort the interpreter while it ends, after the script.
    script += "\nimport sys\n\nsys.stdout.flush()\nos._exit(0)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at:" in done.stdout
