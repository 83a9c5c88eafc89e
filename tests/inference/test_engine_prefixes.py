"""The prefix cache saves prefill and changes no completion."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from architectures import RECURRENT, tiny_model
from engine_rig import (
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    prompt_of,
    weights,
)
from transformers import DynamicCache, PreTrainedModel

from millrace.core.records import Completion, Request
from millrace.inference.embedded.engine import EmbeddedEngine

BLOCK_TOKENS = 4  # of the rig's engines
NUM_TURNS = 10


def computed(engine: EmbeddedEngine, request: Request) -> tuple[list[Completion], int, int]:
    """Its completions, and how many tokens were prefilled and found for it."""
    before = engine.stats()
    done = finish_all(engine, [request])[request.id]
    after = engine.stats()
    return (
        done,
        after.prefill_tokens - before.prefill_tokens,
        after.cached_tokens - before.cached_tokens,
    )


def assert_as_without_cache(done: list[Completion], request: Request, **settings) -> None:
    (expected,) = finish_all(
        make_engine(eos_ids=(), prefix_cache=False, **settings), [request]
    ).values()
    for ours, theirs in zip(done, expected, strict=True):
        assert_same(ours, theirs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    request: Request
    completion: Completion
    num_prefilled: int
    num_found: int
    num_known: int  # tokens of whole blocks that the turn before left


def converse(
    engine: EmbeddedEngine,
    *,
    session: str | None,
    swaps: bool = False,
    num_new: int = 7,
    architecture: str = "qwen3",
) -> list[Turn]:
    """Each turn's prompt is all that was said, and some new tokens; weights change in between."""
    turns: list[Turn] = []
    said = np.empty(0, dtype=np.int32)
    for number in range(NUM_TURNS):
        if swaps and number:
            engine.swap(weights(architecture, seed=number), version=number)
        prompt = np.concatenate([said, prompt_of(num_new, seed=number)])
        request = make_request(str(number), prompt=prompt, max_new_tokens=5, top_k=20)
        request = dataclasses.replace(request, session=session)
        (completion,), num_prefilled, num_found = computed(engine, request)
        turn = Turn(
            request=request,
            completion=completion,
            num_prefilled=num_prefilled,
            num_found=num_found,
            # The last sampled token was never fed.
            num_known=max(len(said) - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS,
        )
        turns.append(turn)
        said = np.concatenate([prompt, completion.tokens])
    return turns


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_shared_prefix_is_computed_once(architecture: str, decode_steps: int):
    engine = make_engine(architecture, eos_ids=(), decode_steps=decode_steps)
    system = prompt_of(18)
    for number, expected in enumerate([0, 16, 16]):
        prompt = np.concatenate([system, prompt_of(5, seed=1 + number)])
        request = make_request(prompt=prompt, n=2, seed=number, top_p=0.9)
        done, num_prefilled, num_found = computed(engine, request)
        assert (num_found, num_prefilled) == (expected, len(prompt) - expected)
        assert_as_without_cache(done, request, architecture=architecture)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_state_is_kept_where_the_second_sequence_branches_off(architecture: str):
    engine = make_engine(architecture, eos_ids=())
    system = prompt_of(18)
    for number, expected in enumerate([0, 0, 16, 16]):
        prompt = np.concatenate([system, prompt_of(5, seed=1 + number)])
        request = make_request(prompt=prompt, n=2, seed=number, top_p=0.9)
        done, num_prefilled, num_found = computed(engine, request)
        assert (num_found, num_prefilled) == (expected, len(prompt) - expected)
        assert_as_without_cache(done, request, architecture=architecture)


PATHS = [("qwen3", 1), ("qwen3", 4), *((architecture, 1) for architecture in RECURRENT)]


@pytest.mark.parametrize(("architecture", "decode_steps"), PATHS)
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
def test_fully_cached_prompt_still_gets_logits(length: int, architecture: str, decode_steps: int):
    engine = make_engine(architecture, eos_ids=(), decode_steps=decode_steps)
    request = make_request(prompt=length, n=3)
    first, *_ = computed(engine, request)
    again, _, num_found = computed(engine, request)
    assert num_found == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for ours, theirs in zip(again, first, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize(("architecture", "decode_steps"), PATHS)
@pytest.mark.parametrize("session", [None, "s"])
def test_turn_prefills_only_new_tokens(session: str | None, architecture: str, decode_steps: int):
    engine = make_engine(architecture, eos_ids=(), decode_steps=decode_steps)
    turns = converse(engine, session=session)
    for turn in turns:
        assert turn.num_found == turn.num_known
        assert turn.num_prefilled == len(turn.request.prompt) - turn.num_known
        assert_as_without_cache([turn.completion], turn.request, architecture=architecture)
    # Linear: every turn after the first costs the same, to within a block.
    assert max(turn.num_prefilled for turn in turns) < 7 + 5 + BLOCK_TOKENS


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_session_with_kept_kv_prefills_only_new_tokens_across_swaps(decode_steps: int):
    engine = make_engine(eos_ids=(), kv="keep", decode_steps=decode_steps)
    turns = converse(engine, session="s", swaps=True)
    cache = DynamicCache(config=tiny_model("qwen3").config)
    for version, turn in enumerate(turns):
        assert turn.num_found == turn.num_known
        assert turn.num_prefilled == len(turn.request.prompt) - turn.num_known
        # The same as if one sequence had gone on: a transformers cache that is never recomputed.
        model = tiny_model("qwen3", seed=version)
        for layer in cache.layers if version else ():
            layer.keys = layer.keys[:, :, : turn.num_known]
            layer.values = layer.values[:, :, : turn.num_known]
        inputs = [turn.request.prompt[turn.num_known :], *turn.completion.tokens[:-1, None]]
        rows = []
        for tokens in inputs:
            ids = torch.from_numpy(tokens).long()[None]
            with torch.no_grad():
                rows.append(model(input_ids=ids, past_key_values=cache).logits[0, -1].float())
        assert_sampled_from(torch.stack(rows), turn.completion, turn.request.sampling)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_session_with_kept_states_continues_them_across_swaps(architecture: str):
    engine = make_engine(architecture, eos_ids=(), kv="keep")
    turns = converse(engine, session="s", swaps=True, architecture=architecture)
    cache = DynamicCache(config=tiny_model(architecture).config)
    said = 0
    for version, turn in enumerate(turns):
        assert turn.num_found == turn.num_known
        # Whole blocks of earlier turns alone were fed to earlier versions.
        model = tiny_model(architecture, seed=version)
        tokens = np.concatenate([turn.request.prompt, turn.completion.tokens])
        again = copy.deepcopy(cache)
        next_known = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        rows = fed(model, tokens[turn.num_known : -1], again)[-len(turn.completion.tokens) :]
        fed(model, tokens[said:next_known], cache)
        said = next_known
        assert_sampled_from(rows, turn.completion, turn.request.sampling)


def fed(model: PreTrainedModel, tokens: np.ndarray, cache: DynamicCache) -> torch.Tensor:
    """Logits after each token, one step at a time."""
    rows = []
    for token in tokens.tolist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
        rows.append(logits[0, -1].float())
    return torch.stack(rows)


@pytest.mark.parametrize("architecture", ["qwen3", *RECURRENT])
@pytest.mark.parametrize(("kv", "session"), [("recompute", "s"), ("keep", None)])
def test_swap_without_session_or_kept_kv_recomputes_prefix_once(
    kv: str, session: str | None, architecture: str
):
    engine = make_engine(architecture, eos_ids=(), kv=kv)
    turns = converse(engine, session=session, swaps=True, architecture=architecture)
    for version, turn in enumerate(turns):
        assert (turn.num_found, turn.num_prefilled) == (0, len(turn.request.prompt))
        settings = {"seed": version, "architecture": architecture}
        assert_as_without_cache([turn.completion], turn.request, **settings)
    _, _, num_found = computed(engine, dataclasses.replace(turns[-1].request, id="again"))
    assert num_found == (len(turns[-1].request.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_branches_of_a_session_share_their_common_prefix():
    engine = make_engine(eos_ids=())
    (trunk,), *_ = computed(engine, in_session(make_request(prompt=10)))
    said = np.concatenate([prompt_of(10), trunk.tokens])  # 26 tokens, 24 of them in whole blocks
    for number, keep in enumerate([26, 13, 4, 26]):
        engine.swap(weights(seed=0), version=number + 1)
        prompt = np.concatenate([said[:keep], prompt_of(6, seed=5 + number)])
        request = make_request(str(number), prompt=prompt, max_new_tokens=3)
        done, _, num_found = computed(engine, in_session(request))
        assert num_found == min(keep, 24) // BLOCK_TOKENS * BLOCK_TOKENS
        assert_as_without_cache(done, request)


def in_session(request: Request, name: str = "s") -> Request:
    return dataclasses.replace(request, session=name)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("version", [0, 1])  # a number may come again with other values
def test_request_without_session_never_finds_kv_of_other_weights(kv: str, version: int):
    engine = make_engine(eos_ids=(), kv=kv)
    request = make_request(prompt=20)
    computed(engine, in_session(request))
    engine.swap(weights(seed=1), version=version)
    done, _, num_found = computed(engine, request)
    assert num_found == 0
    assert_as_without_cache(done, request, seed=1)
    done, _, num_found = computed(engine, in_session(request, "another"))
    assert num_found == 16  # of the weights served now
    assert_as_without_cache(done, request, seed=1)


@pytest.mark.parametrize("spans_swap", [False, True])
def test_request_sharing_a_prefix_does_not_evict_it_from_the_session(spans_swap):
    engine = make_engine(eos_ids=(), num_blocks=24, max_sequences=2)
    turn = in_session(make_request(prompt=20, max_new_tokens=2))
    computed(engine, turn)
    engine.add_request(make_request(prompt=20, max_new_tokens=8))
    engine.step()
    if not spans_swap:
        finish_all(engine)
    engine.swap(weights(seed=1), version=1)
    finish_all(engine)
    # Needs all blocks but four; what only the plain request left goes first.
    finish_all(engine, [make_request(prompt=prompt_of(62, seed=1), max_new_tokens=16)])
    _, _, num_found = computed(engine, turn)
    assert num_found == 16


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("session", [None, "s"])
def test_kv_that_spans_a_swap_is_found_only_by_its_session(kv: str, session):
    engine = make_engine(eos_ids=(), kv=kv)
    engine.add_request(dataclasses.replace(make_request(prompt=10), session=session))
    for _ in range(6):
        engine.step()
    engine.swap(weights(seed=1), version=1)
    (completion,) = finish_all(engine)["r"]
    assert set(completion.versions) == {0, 1}
    follow_up = make_request(prompt=np.concatenate([prompt_of(10), completion.tokens]))
    done, _, num_found = computed(engine, follow_up)
    # What was recomputed under the new weights, all of it, is anyone's.
    assert num_found == (24 if kv == "recompute" else 0)
    assert_as_without_cache(done, follow_up, seed=1)


@pytest.mark.parametrize("architecture", ["qwen3", *RECURRENT])
def test_preempted_sequences_reuse_their_remaining_kv(architecture: str):
    requests = [make_request(str(i), prompt=prompt_of(9, seed=i), seed=i) for i in range(6)]
    engine = make_engine(architecture, eos_ids=(), num_blocks=16)
    done = finish_all(engine, requests)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.free_blocks == 16
    for request in requests:
        assert_as_without_cache(done[request.id], request, architecture=architecture)


@pytest.mark.parametrize("num_snapshots", [1, 3, 64])
def test_waiting_members_of_a_group_prefill_only_the_last_block(num_snapshots: int):
    settings = {"max_sequences": 2, "num_snapshots": num_snapshots}
    engine = make_engine("lfm2", eos_ids=(), **settings)
    request = make_request(prompt=30, n=8, max_new_tokens=9)
    done, num_prefilled, num_found = computed(engine, request)
    num_late = 6
    if num_snapshots == 64:
        assert (num_prefilled, num_found) == (30 + 2 * num_late, 28 * num_late)
    assert num_prefilled + num_found == 30 * (1 + num_late)
    assert_as_without_cache(done, request, architecture="lfm2")


def test_waiting_members_of_a_group_need_not_wait_until_one_of_them_ends():
    engine = make_engine("lfm2", eos_ids=(), max_sequences=2)
    engine.add_request(make_request("short", max_new_tokens=2))
    group = make_request(prompt=30, n=3, max_new_tokens=20)
    done, _, num_found = computed(engine, group)
    assert num_found == 28 * 2
    assert_as_without_cache(done, group, architecture="lfm2")


def test_snapshot_that_a_failed_pass_overwrote_is_not_used():
    engine = make_engine("lfm2", eos_ids=(), num_snapshots=1)
    request = make_request(prompt=9, max_new_tokens=1)
    assert computed(engine, request)[2] == 0
    assert computed(engine, request)[2] == 8

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("a stand-in for a full GPU")

    hook = engine._model.model.layers[-1].register_forward_pre_hook(fail)
    engine.add_request(make_request("other", prompt=prompt_of(9, seed=1)))
    engine.step()
    engine.abort(["other"])
    hook.remove()
    done, _, num_found = computed(engine, request)
    assert num_found == 0
    assert_as_without_cache(done, request, architecture="lfm2")


@pytest.mark.parametrize(("num_blocks", "num_snapshots"), [(40, 4), (16, 64)])
def test_evicted_snapshots_shorten_what_is_reused(num_blocks: int, num_snapshots: int):
    sizes = {"max_sequences": 3, "num_blocks": num_blocks, "eos_ids": ()}
    engine = make_engine("lfm2", num_snapshots=num_snapshots, **sizes)
    plain = make_engine("lfm2", prefix_cache=False, **sizes)
    for number in range(5):
        prompts = [
            np.concatenate([prompt_of(8, seed=number // 3), prompt_of(9)[i:]]) for i in (0, 5)
        ]
        requests = [
            make_request(str(i), prompt=prompt, n=2, seed=number, max_new_tokens=12)
            for i, prompt in enumerate(prompts)
        ]
        done, expected = finish_all(engine, requests), finish_all(plain, requests)
        for request in requests:
            for ours, theirs in zip(done[request.id], expected[request.id], strict=True):
                assert_same(ours, theirs)
    assert 0 < engine.stats().cached_tokens < 5 * 2 * 16
    assert engine.stats().free_blocks == num_blocks


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_old_prefixes_are_evicted_for_new_sequences(decode_steps: int):
    engine = make_engine(eos_ids=(), num_blocks=20, decode_steps=decode_steps)
    for number in range(18):
        prompt = np.concatenate([prompt_of(8, seed=number // 3), prompt_of(9, seed=number)])
        request = make_request(prompt=prompt, n=2, seed=number, max_new_tokens=12)
        done, *_ = computed(engine, request)
        assert_as_without_cache(done, request)
        assert engine.stats().free_blocks == 20
    assert engine.stats().cached_tokens > 0


def test_resubmitted_completion_finds_its_kv():
    engine = make_engine(eos_ids=())
    request = make_request(prompt=10, top_k=5)
    engine.add_request(request)
    for _ in range(8):
        engine.step()
    ((partial,),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    assert len(partial.tokens) == 8
    resumed = dataclasses.replace(request, partial=partial)
    done, num_prefilled, num_found = computed(engine, resumed)
    assert (num_found, num_prefilled) == (16, 2)
    assert_as_without_cache(done, request)


@pytest.mark.parametrize("architecture", ["qwen3", *RECURRENT])
def test_aborted_prefill_leaves_its_computed_chunks(architecture: str):
    engine = make_engine(architecture, eos_ids=(), prefill_tokens=10)
    request = make_request(prompt=40, n=3)
    engine.add_request(request)
    engine.step()
    engine.step()
    engine.abort(["r"])
    assert engine.stats().free_blocks == 256
    done, _, num_found = computed(engine, request)
    assert num_found == 20
    assert_as_without_cache(done, request, architecture=architecture)


def test_number_of_remembered_sessions_is_bounded_by_blocks():
    engine = make_engine(eos_ids=(), num_blocks=8)
    for number in range(30):
        request = make_request(prompt=prompt_of(6, seed=number), max_new_tokens=2)
        computed(engine, in_session(request, str(number)))
    prefixes = engine._scheduler.prefixes
    assert len(prefixes._sessions) == 8
    assert len(prefixes._index) <= 8
    assert not prefixes._leaving


def test_disabled_prefix_cache_computes_everything():
    engine = make_engine(eos_ids=(), prefix_cache=False)
    turns = converse(engine, session="s")
    assert [turn.num_prefilled for turn in turns] == [len(turn.request.prompt) for turn in turns]
    assert engine.stats().cached_tokens == 0
