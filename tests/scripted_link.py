"""A link whose other end is a script: it decides before which forward pass a message arrives."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fakes import Listener

from millrace.cluster.messages import (
    Completed,
    GenerateDone,
    Message,
    Part,
    Stop,
    SwapWeights,
    TokensSampled,
    WorkerProgress,
)
from millrace.core.records import Completion
from millrace.inference.embedded.engine import EmbeddedEngine

POLL_S = 0.001  # of an engine that waits
Batch = Sequence[Message | Callable[[], object]]


class RecordedCall:
    def __init__(self, message: Message, engine: EmbeddedEngine) -> None:
        self.message = message
        self.listener = Listener()
        self._completions: dict[int, Completion] = {}
        self.replies: list[Message | BaseException | None] = []
        self.tokens_at_reply: int | None = None
        self._engine = engine

    def send_part(self, part: Part) -> None:
        assert not self.replies, "a part comes before the reply"
        if isinstance(part, Completed):
            self._completions |= part.completions
            return
        assert isinstance(part, TokensSampled)
        for piece in part.pieces:
            self.listener(piece)

    def completions(self) -> list[Completion]:
        """Of a Generate call, in order."""
        (reply,) = self.replies
        assert isinstance(reply, GenerateDone)
        ended = self._completions | reply.completions
        return [ended[member] for member in sorted(ended)]

    def reply(self, message: Message | None = None) -> None:
        self._answer(message)

    def fail(self, error: BaseException) -> None:
        self._answer(error)

    def _answer(self, answer: Message | BaseException | None) -> None:
        assert not self.replies, "a call is answered once"
        self.replies.append(answer)
        self.tokens_at_reply = self._engine.stats().generated_tokens


class ScriptedLink:
    """Hands out one list of messages before each pass, and in a round whenever it looks for some;
    `tokens` counts what was made by then. What is no message is called."""

    def __init__(
        self,
        script: Sequence[Batch],
        engine: EmbeddedEngine,
        *,
        until: tuple[type[Message], ...] = (SwapWeights,),
    ) -> None:
        """Ends with Stop once calls of the kinds `until` are answered."""
        self._until = until
        self.calls: list[RecordedCall] = []
        self.tokens: list[int] = []
        self.spans: list[tuple[str, bool]] = []
        self._engine = engine
        self._arrivals = self._play(script)

    def _play(self, script: Sequence[Batch]) -> Iterator[RecordedCall | None]:
        """The script, and Stop when what it waits for is answered."""
        for batch in script:
            self.tokens.append(self._engine.stats().generated_tokens)
            for message in batch:
                if isinstance(message, Message):
                    self.calls.append(RecordedCall(message, self._engine))
                    yield self.calls[-1]
                else:
                    message()
            yield None
        while any(isinstance(c.message, self._until) and not c.replies for c in self.calls):
            yield None
        self.tokens.append(self._engine.stats().generated_tokens)
        self.calls.append(RecordedCall(Stop(), self._engine))
        yield self.calls[-1]

    def receive(self, timeout_s: float | None = None) -> RecordedCall | None:
        call = next(self._arrivals)
        if call is None and timeout_s:
            time.sleep(POLL_S)
        return call

    def emit(self, message: Message) -> None:
        assert isinstance(message, WorkerProgress)
        self.spans += [(span.name, span.busy) for span in message.spans]

    def calls_of(self, kind: type[Message]) -> list[RecordedCall]:
        return [call for call in self.calls if isinstance(call.message, kind)]

    def reply_to(self, kind: type[Message]) -> Any:
        (call,) = self.calls_of(kind)
        (reply,) = call.replies
        return reply
