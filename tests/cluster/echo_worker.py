"""A worker for tests: each call says, in its request's id, what the worker shall do."""

import os
import signal
import threading
import time

import numpy as np

from millrace.cluster.link import END_SIGNAL, Link, WorkerCall, run_worker
from millrace.cluster.messages import Generate, GenerateDone, Stop, TokensSampled, WorkerProgress
from millrace.core.errors import ScoreError
from millrace.core.records import Completion, CompletionChunk, Request, Sampling


def ask(what: str, tokens: np.ndarray | None = None) -> Generate:
    """The call that makes this worker do `what`."""
    prompt = np.arange(4, dtype=np.int32) if tokens is None else tokens
    return Generate(request=Request(id=what, prompt=prompt, sampling=Sampling()))


def answer(tokens: np.ndarray) -> GenerateDone:
    none = np.zeros(0, dtype=np.int32)
    completion = Completion(tokens=tokens, logprobs=none, versions=none, finish="stop", text="")
    return GenerateDone(completions={0: completion})


def piece(number: int) -> CompletionChunk:
    none = np.zeros(0, dtype=np.float32)
    return CompletionChunk(member=number, tokens=none, logprobs=none, versions=none)


def handle(call: WorkerCall, request: Request, link: Link) -> None:
    match request.id.split():
        case ["echo"]:
            call.reply(answer(request.prompt))
        case ["echo", "after", seconds]:
            reply = threading.Timer(float(seconds), call.reply, [answer(request.prompt)])
            reply.daemon = True
            reply.start()
        case ["zeros", count]:
            call.reply(answer(np.zeros(int(count), dtype=np.int32)))
        case ["zeros", count, "and", "leave"]:
            call.reply(answer(np.zeros(int(count), dtype=np.int32)))
            raise SystemExit(3)
        case ["tell", count]:
            for number in range(int(count)):
                call.send_part(TokensSampled(pieces=[piece(number)]))
            call.reply(answer(request.prompt))
        case ["emit", count]:
            for number in range(int(count)):
                link.emit(WorkerProgress(spans=[], counters={"number": float(number)}))
            call.reply()
        case ["fail"]:
            call.fail(ScoreError("The reward is NaN."))
        case ["stumble"]:
            try:
                raise KeyError("missing")
            except KeyError as error:
                call.fail(error)
        case ["raise"]:
            raise RuntimeError("out of luck")
        case ["quote", "a", "completion"]:
            print("a \x1b[2J completion \u202e")
            raise RuntimeError("a \x1b[2J completion \u202e\rover")
        case ["raise", "but", "stay"]:
            threading.Thread(target=time.sleep, args=[3600]).start()
            raise RuntimeError("out of luck")
        case ["exit", code]:
            print("the last line of its log", flush=True)
            os._exit(int(code))
        case ["go", "deaf"]:
            signal.signal(END_SIGNAL, signal.SIG_IGN)
            call.reply()
            time.sleep(3600)
        case ["sleep"]:
            call.reply()
            time.sleep(3600)
        case ["have", "a", "child"]:
            child = os.fork()
            if child == 0:
                time.sleep(3600)
            call.reply(answer(np.array([child])))
        case ["pid"]:
            call.reply(answer(np.array([os.getpid()])))
        case ["gpus"]:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            call.reply(answer(np.array([int(gpu) for gpu in visible.split(",") if gpu], np.int32)))
        case ["count", "secrets"]:
            names = [name for name in os.environ if name.startswith(("MILLRACE_HUB", "JUDGE_"))]
            call.reply(answer(np.array([len(names)])))
        case other:
            raise AssertionError(other)


def main(link: Link, name: str) -> None:
    while True:
        call = link.receive(timeout_s=None)
        assert call is not None
        match call.message:
            case Stop():
                call.reply()
                return
            case Generate(request=request):
                handle(call, request, link)
            case message:
                call.fail(ValueError(f"{name} does not know {type(message).__name__}"))


if __name__ == "__main__":
    run_worker(main)
