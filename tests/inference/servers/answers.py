"""Answers of a vLLM server to each call of an engine, as raw JSON."""

import json
from typing import Any

from millrace.inference.servers.vllm import VllmClient

PROMPT = (3, 4, 5, 6)


def answers_of(client: VllmClient) -> dict[str, Any]:
    sampling = {"max_tokens": 3, "temperature": 0.8, "logprobs": 0, "stop_token_ids": [1]}
    body = client._body("recorded", PROMPT, cache_salt="s", stream=True, **sampling)
    first, *_, last = client._run(_streamed(client, body))
    return {
        "models": client.call("/v1/models", method="GET"),
        "first_chunk": first,
        "last_chunk": last,
        "single": client.sample_once(PROMPT, max_tokens=1, temperature=1.0, logprobs=2),
        "scored": client.sample_once(PROMPT, max_tokens=1, temperature=1.0, prompt_logprobs=0),
        "abort": client.call("/abort_requests", {"request_ids": ["generate-tokens-x"]}),
        "pause": client.call("/pause", mode="keep", clear_cache="false"),
        "version": client.call("/update_weight_version", {"new_version": "0"}),
        "resume": client.call("/resume"),
        "model": client.call("/collective_rpc", {"method": "millrace_model", "args": []}),
    }


async def _streamed(client: VllmClient, body: dict[str, Any]) -> list[Any]:
    async with client._session.post(f"{client.url}/inference/v1/generate", json=body) as answer:
        lines = [line async for line in answer.content if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def assert_has_form(answer: Any, recorded: Any, *, where: str) -> None:
    """Every field of an answer is in the recorded one, with a value of the same kind."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            # The keys of prompt_logprobs are token ids.
            assert key.isdigit() or key in recorded, f"{where}.{key}"
            other = next(iter(recorded.values())) if key.isdigit() else recorded[key]
            assert_has_form(value, other, where=f"{where}.{key}")
    elif isinstance(answer, list):
        assert isinstance(recorded, list), where
        for value, other in zip(answer, recorded, strict=False):
            assert_has_form(value, other, where=f"{where}[]")
    else:
        assert type(answer) is type(recorded), f"{where}: {answer!r}, recorded {recorded!r}"
