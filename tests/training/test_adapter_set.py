"""Several adapters over one model. Gradients are compared with plain transformers and autograd,
where each adapted weight is W + scale B A."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.core.errors import TaskError
from millrace.models.attention.packed import PACKED
from millrace.models.loading import load_model
from millrace.training.adapters.adapter_set import ALPHA, RESERVED_BYTES, AdapterSet, _packs
from millrace.training.adapters.requests import (
    PASS_TOKENS,
    AdamSettings,
    AdapterPass,
    AdapterShape,
    PassResult,
    TrainingDatum,
)

RANK = 3
ADAM = AdamSettings(
    learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(path: Path) -> PreTrainedModel:
    device = torch.device("cpu")
    return load_model(str(path), dtype=torch.float32, device=device, attention=PACKED)


def make_set(path: Path) -> AdapterSet:
    adapters = AdapterSet(load(path), path=str(path), max_context=64)
    adapters.create("a", AdapterShape(rank=RANK), seed=1)
    return adapters


def make_data(seed: int = 0, *, sizes: tuple[int, ...] = (7, 12, 5)) -> list[TrainingDatum]:
    rng = np.random.default_rng(seed)
    data = []
    for size in sizes:
        tokens = rng.integers(2, 20, size + 1)
        data.append(
            TrainingDatum(
                tokens=tokens[:-1],
                inputs={
                    "target_tokens": tokens[1:],
                    "weights": rng.normal(size=size).astype(np.float32),
                    "advantages": rng.normal(size=size).astype(np.float32),
                    "logprobs": rng.uniform(-4, -2, size).astype(np.float32),
                },
            )
        )
    return data


def compute(
    adapters: AdapterSet,
    name: str,
    data: list[TrainingDatum],
    *,
    loss: str,
    settings: dict[str, float],
    backward: bool,
) -> PassResult:
    one = AdapterPass(model_id=name, data=data, loss=loss, settings=settings, backward=backward)
    (outcome,) = adapters.compute([one])
    if isinstance(outcome, TaskError):
        raise outcome
    return outcome


def train_once(adapters: AdapterSet, name: str = "a", *, seed: int = 9) -> float:
    _, loss = compute(
        adapters, name, make_data(seed), loss="cross_entropy", settings={}, backward=True
    )
    adapters.step(name, ADAM)
    return loss


def plain_loss(loss: str, logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Written anew, token by token."""
    total = torch.zeros(())
    for i in range(len(logprobs)):
        own = logprobs[i]
        if loss == "cross_entropy":
            total = total - own * inputs["weights"][i]
            continue
        ratio, advantage = torch.exp(own - inputs["logprobs"][i]), inputs["advantages"][i]
        clipped = torch.clip(ratio, 0.7, 1.2)
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "ppo":
            total = total - min(ratio * advantage, clipped * advantage)
        else:
            total = total - clipped.detach() * advantage * own
    return total


def plain_gradient(
    path: Path, adapters: AdapterSet, data: list[TrainingDatum], loss: str
) -> tuple[float, dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    factors = {
        name: value.detach().clone().requires_grad_()
        for name, value in adapters.owned["a"].parameters.items()
    }
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for layer in {name.partition(".lora_")[0] for name in factors}:
        a, b = (factors[f"{layer}.lora_{part}.weight"] for part in "AB")
        name = layer if layer in weights else f"{layer}.weight"
        weights[name] = weights[name].detach() + ALPHA / RANK * (b @ a)
    total = torch.zeros(())
    for datum in data:
        ids = torch.from_numpy(datum.tokens)[None]
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids}).logits[0]
        inputs = {name: torch.from_numpy(value) for name, value in datum.inputs.items()}
        logprobs = logits.log_softmax(-1).gather(1, inputs["target_tokens"][:, None])[:, 0]
        total = total + plain_loss(loss, logprobs, inputs)
    grads = torch.autograd.grad(total, list(factors.values()))
    return total.item(), dict(zip(factors, grads, strict=True))


def test_calls_for_an_adapter_that_was_removed_are_refused(model_path: Path, tmp_path: Path):
    adapters, folder = make_set(model_path), tmp_path / "saved"
    adapters.save("a", folder, optimizer=True, about={})
    del adapters.owned["a"]
    for call in (
        lambda: train_once(adapters),
        lambda: adapters.step("a", ADAM),
        lambda: adapters.save("a", folder, optimizer=True, about={}),
        lambda: adapters.load("a", folder, optimizer=True),
    ):
        with pytest.raises(TaskError, match="session of the model has ended"):
            call()


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_the_gradient_of_every_parameter_equals_that_of_plain_torch(
    loss: str, num_experts: int, tmp_path: Path
):
    path = make_tiny_model(tmp_path, num_experts=num_experts)
    adapters, data = make_set(path), make_data()
    train_once(adapters)  # so that B is not 0, and A has a gradient
    settings = {"clip_low_threshold": 0.7} if loss in ("ppo", "cispo") else {}
    _, total = compute(adapters, "a", data, loss=loss, settings=settings, backward=True)
    expected_total, expected = plain_gradient(path, adapters, data, loss)
    assert total == pytest.approx(expected_total, rel=1e-4)
    found = adapters.owned["a"].gradient
    assert found is not None
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], grad, rtol=2e-3, atol=1e-4, msg=name)


def test_gradients_of_several_passes_add_up_and_a_forward_pass_adds_nothing(model_path: Path):
    apart, together = make_set(model_path), make_set(model_path)
    data = make_data()
    for datum in data:
        compute(apart, "a", [datum], loss="cross_entropy", settings={}, backward=True)
        compute(apart, "a", [datum], loss="cross_entropy", settings={}, backward=False)
    compute(together, "a", data, loss="cross_entropy", settings={}, backward=True)
    one, other = apart.owned["a"].gradient, together.owned["a"].gradient
    assert one is not None
    assert other is not None
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def grads_of(adapters: AdapterSet, name: str) -> dict[str, Tensor]:
    gradient = adapters.owned[name].gradient
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("num_experts", [0, 4])
def test_passes_of_several_adapters_together_equal_separate_ones(num_experts: int, tmp_path: Path):
    path = make_tiny_model(tmp_path, num_experts=num_experts)
    apart, together = make_set(path), make_set(path)
    shapes = {
        "b": AdapterShape(rank=8),
        "c": AdapterShape(rank=2, mlp=False),
        "d": AdapterShape(rank=5, attention=False),
    }
    for adapters in (apart, together):
        for seed, (name, shape) in enumerate(shapes.items()):
            adapters.create(name, shape, seed=seed)
        for name in adapters.owned:
            train_once(adapters, name)  # so that B is not 0
            compute(adapters, name, make_data(3), loss="ppo", settings={}, backward=True)
    losses = {"a": "cross_entropy", "b": "ppo", "c": "importance_sampling", "d": "cross_entropy"}
    passes = [
        AdapterPass(model_id=name, data=make_data(i), loss=loss, settings={}, backward=name != "d")
        for i, (name, loss) in enumerate(losses.items())
    ]
    expected = [apart.compute([one])[0] for one in passes]
    for found, one in zip(together.compute(passes), expected, strict=True):
        assert not isinstance(found, TaskError)
        assert not isinstance(one, TaskError)
        assert found[1] == pytest.approx(one[1], rel=1e-5)
        for logprobs, other in zip(found[0], one[0], strict=True):
            np.testing.assert_allclose(logprobs, other, rtol=1e-5)
    for name in losses:
        one, other = grads_of(apart, name), grads_of(together, name)
        largest = max(float(grad.abs().max()) for grad in one.values())
        for tensor, grad in one.items():
            difference = float((other[tensor] - grad).abs().max())
            assert difference <= 1e-6 * largest, (name, tensor, difference / largest)
            assert name == "d" or grad.abs().max() > 0, (name, tensor)


def test_a_pass_that_fails_does_not_change_the_passes_beside_it(model_path: Path):
    apart, together = make_set(model_path), make_set(model_path)
    for adapters in (apart, together):
        for name in "bcd":
            adapters.create(name, AdapterShape(rank=4), seed=2)
    with torch.no_grad():
        for parameter in together.owned["b"].parameters.values():
            parameter.fill_(torch.nan)
    data, far = make_data(), make_data(1)
    far[0].inputs["target_tokens"][0] = 10**6
    passes = [
        AdapterPass(model_id=name, data=given, loss="cross_entropy", settings={}, backward=True)
        for name, given in (("b", data), ("c", far), ("missing", data), ("a", data), ("d", data))
    ]
    *failed, one, other = together.compute(passes)
    for outcome, message in zip(failed, ("not finite", "a token", "has ended"), strict=True):
        assert message in str(outcome).lower()
    for name, outcome in (("a", one), ("d", other)):
        assert not isinstance(outcome, TaskError)
        logprobs, _ = compute(apart, name, data, loss="cross_entropy", settings={}, backward=True)
        for own, expected in zip(outcome[0], logprobs, strict=True):
            np.testing.assert_array_equal(own, expected)
        for tensor, grad in grads_of(apart, name).items():
            torch.testing.assert_close(grads_of(together, name)[tensor], grad, rtol=0, atol=0)
    assert together.owned["b"].gradient is None
    assert together.owned["c"].gradient is None


def test_only_the_pass_that_raises_an_error_fails(model_path: Path):
    apart, together = make_set(model_path), make_set(model_path)
    together.create("b", AdapterShape(rank=4), seed=2)
    broken = together.owned["b"]
    broken.flat = torch.nn.Parameter(broken.flat.detach()[:-1])
    passes = [
        AdapterPass(
            model_id=name, data=make_data(), loss="cross_entropy", settings={}, backward=True
        )
        for name in "ba"
    ]
    failed, found = together.compute(passes)
    assert isinstance(failed, RuntimeError)
    assert not isinstance(found, Exception)
    (expected,) = apart.compute(passes[1:])
    assert not isinstance(expected, Exception)
    assert found[1] == expected[1]
    assert grads_of(together, "a").keys() == grads_of(apart, "a").keys()
    assert together.owned["b"].gradient is None


def test_data_of_many_adapters_are_divided_into_packs_of_bounded_tokens_and_adapters():
    datum = TrainingDatum(tokens=np.zeros(PASS_TOKENS // 4, np.int64), inputs={})
    passes = [
        AdapterPass(model_id=str(i), data=[datum] * size, loss="", settings={}, backward=True)
        for i, size in enumerate((1, 6, 1, 1, 1))
    ]
    found = [{i: len(data) for i, data in pack.items()} for pack in _packs(passes, max_adapters=2)]
    assert found == [{0: 1, 1: 3}, {1: 3, 2: 1}, {3: 1, 4: 1}]


def test_a_datum_counts_as_its_targets_if_they_are_more_than_its_tokens():
    wide = TrainingDatum(
        tokens=np.zeros(2, np.int64), inputs={"target_tokens": np.zeros((2, PASS_TOKENS // 4))}
    )
    one = AdapterPass(model_id="a", data=[wide] * 3, loss="", settings={}, backward=True)
    assert one.num_tokens == 3 * PASS_TOKENS // 2
    assert [len(pack[0]) for pack in _packs([one], max_adapters=2)] == [2, 1]


def test_targets_may_be_several_per_token(model_path: Path):
    adapters, (datum, *_) = make_set(model_path), make_data()
    both = np.stack([datum.inputs["target_tokens"], datum.inputs["target_tokens"][::-1]], 1)
    weights = np.ones_like(both, np.float32)
    wide = TrainingDatum(tokens=datum.tokens, inputs={"target_tokens": both, "weights": weights})
    (found,), total = compute(
        adapters, "a", [wide], loss="cross_entropy", settings={}, backward=True
    )
    (narrow,), _ = compute(
        adapters, "a", [datum], loss="cross_entropy", settings={}, backward=False
    )
    assert found.shape == both.shape
    np.testing.assert_allclose(found[:, 0], narrow, rtol=1e-5)
    assert total == pytest.approx(-found.sum(), rel=1e-5)


def test_a_step_is_that_of_adamw_with_clipping(model_path: Path):
    adapters = make_set(model_path)
    own = adapters.owned["a"]
    copies = {name: value.detach().clone() for name, value in own.parameters.items()}
    for copy in copies.values():
        copy.requires_grad_()
    reference = torch.optim.AdamW(
        copies.values(), lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for seed in (1, 2):
        compute(adapters, "a", make_data(seed), loss="cross_entropy", settings={}, backward=True)
        assert own.gradient is not None
        for name, copy in copies.items():
            copy.grad = own.gradient[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.5)
        reference.step()
        assert adapters.step("a", ADAM)["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, copy in copies.items():
        torch.testing.assert_close(own.parameters[name], copy, msg=name)
    with pytest.raises(TaskError, match="no gradient"):
        adapters.step("a", ADAM)


@pytest.mark.parametrize(
    "broken", [{"eps": 0.0}, {"learning_rate": 1e30}, {"weight_decay": 1e20}], ids=str
)
def test_a_step_to_weights_that_overflow_changes_nothing(
    model_path: Path, broken: dict[str, float]
):
    adapters = make_set(model_path)
    for name in "ab":
        adapters.create(name, AdapterShape(rank=RANK), seed=1)
        compute(adapters, name, make_data(2), loss="cross_entropy", settings={}, backward=True)
    with pytest.raises(TaskError, match="it was not made"):
        adapters.step("a", replace(ADAM, **broken))
    assert adapters.step("a", ADAM) == adapters.step("b", ADAM)
    assert train_once(adapters, "a") == train_once(adapters, "b")
    for one, other in zip(*(adapters.owned[n].parameters.values() for n in "ab"), strict=True):
        assert torch.equal(one, other)


def test_adapters_that_would_not_fit_once_they_are_trained_are_refused(model_path: Path):
    one = make_set(model_path).owned["a"]
    num_weights = sum(each.numel() for each in one.parameters.values())
    limit = RESERVED_BYTES + 3 * 16 * num_weights  # of three adapters

    def free_bytes() -> int:
        tensors = [t for each in adapters.owned.values() for t in (each.gradient or {}).values()]
        for each in adapters.owned.values():
            tensors += [each.flat, *each.optimizer.state.get(each.flat, {}).values()]
        return limit - sum(tensor.nbytes for tensor in tensors if tensor.ndim)

    model, shape = load(model_path), AdapterShape(rank=RANK)
    adapters = AdapterSet(model, path=str(model_path), max_context=64, free_bytes=free_bytes)
    for name in "ab":
        adapters.create(name, shape, seed=1)
    train_once(adapters, "b")
    adapters.create("c", shape, seed=1)
    with pytest.raises(TaskError, match=r"room for 0\.00 GiB .* lower the rank"):
        adapters.create("d", AdapterShape(rank=1), seed=1)
    for name in "abc":
        train_once(adapters, name)
        assert free_bytes() >= RESERVED_BYTES
    with pytest.raises(TaskError, match="lower the rank"):
        adapters.create("d", AdapterShape(rank=1), seed=1)
    del adapters.owned["b"]
    adapters.create("d", shape, seed=1)


def test_adapters_do_not_change_each_other(model_path: Path):
    adapters = make_set(model_path)
    adapters.create("b", AdapterShape(rank=2, mlp=False), seed=2)
    before, _ = compute(
        adapters, "b", make_data(), loss="cross_entropy", settings={}, backward=False
    )
    train_once(adapters, "a")
    after, _ = compute(
        adapters, "b", make_data(), loss="cross_entropy", settings={}, backward=False
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all("self_attn" in name for name in adapters.owned["b"].parameters)
    assert adapters.owned["b"].gradient is None


def test_training_continues_from_a_saved_state_with_the_same_losses(
    model_path: Path, tmp_path: Path
):
    first = make_set(model_path)
    train_once(first)
    train_once(first)
    first.save("a", tmp_path / "state", optimizer=True, about={"base_model": "tiny"})
    second = make_set(model_path)
    second.load("a", tmp_path / "state", optimizer=True)
    assert [train_once(first) for _ in range(3)] == [train_once(second) for _ in range(3)]
    fresh = make_set(model_path)
    fresh.load("a", tmp_path / "state", optimizer=False)
    assert fresh.owned["a"].num_steps == 0


def test_a_saved_adapter_loads_into_peft(model_path: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    adapters = make_set(model_path)
    train_once(adapters)
    adapters.save("a", tmp_path / "state", optimizer=False, about={})
    (datum, *_) = make_data()
    base = AutoModelForCausalLM.from_pretrained(model_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "state").eval()
    logits = loaded(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
    expected = logits.log_softmax(-1).gather(1, targets)[:, 0].detach().numpy()
    (found,), _ = compute(adapters, "a", [datum], loss="cross_entropy", settings={}, backward=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    tokens = np.append(datum.tokens, datum.inputs["target_tokens"][-1])
    scored = adapters.prompt_logprobs(tokens, tmp_path / "state")
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[1:], expected, atol=1e-5)


@pytest.mark.parametrize("has_room", [True, False])
def test_layers_are_computed_twice_only_if_their_activations_do_not_fit(
    model_path: Path, has_room: bool
):
    counts = []
    model = load(model_path)
    room = [2**40]
    adapters = AdapterSet(
        model, path=str(model_path), max_context=64, free_bytes=lambda: room[0], checkpoints=True
    )
    adapters.create("a", AdapterShape(rank=RANK), seed=1)
    layer = model.get_submodule("model.layers.0.mlp")
    layer.register_forward_pre_hook(lambda *_: counts.append(1))
    if not has_room:
        room[0] = RESERVED_BYTES
    found = train_once(adapters)
    assert found == train_once(make_set(model_path))
    assert len(counts) == (1 if has_room else 2)


def test_a_refused_pass_leaves_the_gradient(model_path: Path):
    adapters, (datum, *_) = make_set(model_path), make_data()
    compute(adapters, "a", [datum], loss="cross_entropy", settings={}, backward=True)
    before = adapters.owned["a"].flat_gradient
    for change, message in (
        ({"target_tokens": datum.inputs["target_tokens"] + 100}, "not an integer from 0"),
        ({"weights": datum.inputs["weights"][1:]}, "a row for each token"),
        (dict.fromkeys(("target_tokens", "weights"), np.zeros((7, 0), int)), "a row for each tok"),
        ({"weights": datum.inputs["weights"] * np.inf}, "not finite"),
    ):
        wrong = TrainingDatum(tokens=datum.tokens, inputs={**datum.inputs, **change})
        with pytest.raises(TaskError, match=message):
            compute(adapters, "a", [wrong], loss="cross_entropy", settings={}, backward=True)
    with pytest.raises(TaskError, match="has no setting 'beta'"):
        compute(adapters, "a", [datum], loss="ppo", settings={"beta": 1.0}, backward=True)
    assert adapters.owned["a"].flat_gradient is before
