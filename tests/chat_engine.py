"""An engine that says what a test wants, with the tokens of a real tokenizer."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from fakes import ScriptedEngine
from families import FAMILIES, tokenizer_of

from millrace.core.protocols import OnCompletion, OnTokens
from millrace.core.records import Completion, Request, Sampling
from millrace.environments.function_environment import (
    FunctionEnvironment,
    LoadedEnvironment,
    play_in_thread,
)
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer, RoleModel
from millrace.environments.threads import LoopThread

TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class ChatEngine(ScriptedEngine):
    """`answer` is asked with the text of each prompt, and may be a coroutine."""

    def __init__(self, answer: Callable, *, family: str = "chatml") -> None:
        super().__init__()
        self._answer = answer
        self._tokenizer = TOKENIZERS[family]
        self._end = FAMILIES[family].end
        self.prompts: list[str] = []

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.requests.append(request)
        self.prompts.append(self._tokenizer.decode(request.prompt))
        text = self._answer(self.prompts[-1])
        text = await text if asyncio.iscoroutine(text) else text
        ids = self._tokenizer.encode(text + self._end, add_special_tokens=False)
        return [
            Completion(
                tokens=np.array(ids, np.int32),
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=np.zeros(len(ids), np.int32),
                finish="stop",
                text=text,
            )
        ]


def player_of(
    function,
    engine: ChatEngine,
    *,
    thread: LoopThread,
    family: str = "chatml",
    max_context: int = 2000,
    others: Mapping[str, tuple[RoleModel, ChatEngine]] | None = None,
    **rules,
) -> Player:
    """`others`: models that roles may be, each with its engine."""
    renderer = Renderer(TOKENIZERS[family])
    others = others or {}
    loaded = LoadedEnvironment(
        function=function,
        renderer=renderer,
        others={name: model for name, (model, _engine) in others.items()},
        records=rules.pop("records", False),
    )
    host = partial(play_in_thread, loaded, thread)
    environment = FunctionEnvironment(host, renderer=renderer, **rules)
    return Player(
        environment=environment,
        engine=engine,
        renderer=renderer,
        sampling=Sampling(),
        max_context=max_context,
        seed=7,
        others={name: engine for name, (_model, engine) in others.items()},
    )
