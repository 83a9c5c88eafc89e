"""Reward functions that scorer processes import by reference."""

import asyncio
import os
import signal
import sys
import threading
import time

NOT_A_FUNCTION = 3


def exact(prompts, completions, completion_ids, answer, **kwargs):
    print(f"exact sees {len(completions)} completions")
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def length(completions):
    return [len(c) for c in completions]


def only_short(completions):
    return [1.0 if len(c) < 2 else None for c in completions]


def nothing(completions):
    return [None] * len(completions)


def echo_shapes(prompts, completions, completion_ids, **columns):
    """1 if all arguments have the form that TRL documents for a chat task."""
    assert columns == {"answer": ["2", "2"], "meta": [{"level": [1, None]}] * 2}
    return [
        float(
            prompt == [{"role": "user", "content": "1+1?"}]
            and completion == [{"role": "assistant", "content": text}]
            and ids == [1, 2]
        )
        for prompt, completion, ids, text in zip(
            prompts, completions, completion_ids, ["2", "33"], strict=True
        )
    ]


def raises(completions):
    raise ValueError("cannot\njudge this")


def too_few(completions):
    return [1.0]


def nan(completions):
    return [float("nan")] * len(completions)


def sleeps(completions):
    """A blocking function that sleeps for the seconds in each completion."""
    seconds = float(completions[0])
    time.sleep(seconds)
    return [seconds] * len(completions)


def hangs_on_x(completions):
    while completions[0] == "x":
        pass
    return [1.0] * len(completions)


def exits_on_x(completions):
    if completions[0] == "x":
        os._exit(3)
    return [1.0] * len(completions)


def leaves_on_x(completions):
    if completions[0] == "x":
        sys.exit("done with it")
    return [1.0] * len(completions)


def segfaults_on_x(completions):
    if completions[0] == "x":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def own_loop_and_signals(completions):
    """Uses features that need the main thread without a running event loop."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    assert threading.current_thread() is threading.main_thread()

    async def judge():
        return [1.0] * len(completions)

    return asyncio.run(judge())


async def sleeps_async(completions):
    seconds = float(completions[0])
    await asyncio.sleep(seconds)
    return [float(os.getpid())] * len(completions)


async def raises_async(completions):
    await asyncio.sleep(0)
    raise KeyError("result")


async def leaves_async(completions):
    await asyncio.sleep(0)
    sys.exit(1)


async def misbehaves_async(completions):
    """x ends the process, o ignores cancellation; the others take a moment."""
    if completions[0] == "x":
        await asyncio.sleep(0.1)
        os._exit(4)
    while completions[0] == "o":
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(0.6)
    return [1.0] * len(completions)
