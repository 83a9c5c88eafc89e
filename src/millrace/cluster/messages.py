"""Every message between processes. One tagged union; anything else on a socket is refused.

Arrays inside (numpy) travel as raw frames beside the message, uncopied; see wire.py.
A call has exactly one reply: the message named behind its arrow, or an Error. Parts may come before
it, where the call says so.
"""

from typing import Any

import msgspec
import numpy as np

from millrace.core.microbatch import Batch
from millrace.core.records import Completion, CompletionChunk, Prompt, Request
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.core.spans import Span
from millrace.core.weight_update import WeightUpdate


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Part(Message, frozen=True):
    """Base of what a worker says about a call before it replies."""


# To any worker


class Stop(Message, frozen=True):
    """Finish and exit. -> Done"""


class Done(Message, frozen=True):
    """A reply without content."""


class Error(Message, frozen=True):
    """A reply: the call failed in the worker, which goes on."""

    kind: str  # class name of the exception
    reason: str  # one sentence
    traceback: str


# From any worker, unasked


class Hello(Message, frozen=True):
    """First message of a worker's life."""

    worker: str
    pid: int


class WorkerProgress(Message, frozen=True):
    """Sent a few times a second: what the worker did since the last one."""

    spans: list[Span]
    counters: dict[str, float]  # e.g. tokens generated so far
    work: float = 0.0  # grows only if what it was asked for moves
    waits: bool = True  # it cannot go on by itself, such as one that is told to pause


class Failed(Message, frozen=True):
    """Last message of a worker that cannot go on."""

    reason: str
    traceback: str


# Between the controller and a host that brings workers: `millrace join`


class Join(Message, frozen=True):
    """From a host: it offers workers. -> Admitted"""

    host: str  # its name, for reading
    num_workers: int


class JoinPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # of the worker
    token: str  # which that worker shows to the hub

    def __repr__(self) -> str:
        return f"Place(name={self.name!r})"


class JoinAdmitted(Message, frozen=True):
    places: list[JoinPlace]


class Ended(Message, frozen=True):
    """Unasked, from a host: a worker process of it has ended."""

    worker: str
    reason: str  # goes on from "Worker 'engine-1' ..."
    log_tail: str
    may_have_spoken: bool  # its last messages may still be under way


class EndWorker(Message, frozen=True):
    """Unasked, to a host: end this worker process."""

    worker: str
    kill: bool  # SIGKILL, else SIGTERM


class DumpStacks(Message, frozen=True):
    """Unasked, to a host: have this worker process write down where it hangs. -> Dumped"""

    worker: str


class Dumped(Message, frozen=True):
    """Unasked, from a host: what came of DumpStacks."""

    worker: str
    told: str  # how it went, with the path of the log
    log_tail: str


class Beat(Message, frozen=True):
    """Unasked, to a host and to its workers: the controller is here. A worker sends it back."""


# Engine


class StartEngine(Message, frozen=True):
    """Load the model. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    model_path: str  # the config's model, or a checkpoint of it
    version: int  # the Version those weights are
    adapter_path: str | None = None  # of a LoRA run: the checkpoint whose adapter goes on top
    records_routes: bool = False  # record the experts of each token of a mixture of experts


class Generate(Message, frozen=True):
    """-> Generated, once all n completions are finished or aborted. Before that, if it streams,
    Sampled; and Completed, if each completion is wanted as soon as it has ended"""

    request: Request
    stream: bool = False
    per_completion: bool = False


class TokensSampled(Part, frozen=True):
    """What the completions have sampled since the last one."""

    pieces: list[CompletionChunk]


class Completed(Part, frozen=True):
    """Completions that have ended before others of their request."""

    completions: dict[int, Completion]  # by their number in the request


class GenerateDone(Message, frozen=True):
    completions: list[Completion | None]  # None = it was told before


class SwapWeights(Message, frozen=True):
    """Stage, verify, and make visible between two forward passes. -> Swapped"""

    update: WeightUpdate


class Swapped(Message, frozen=True):
    version: int
    stage_ms: float  # beside decoding
    gap_ms: float  # between the two forward passes


class ScoreTokens(Message, frozen=True):
    """Score the tokens of these requests; to a teacher or an engine. -> TokensScored

    Requests of one message that share a prefix are computed together."""

    requests: list[ScoreRequest]


class TokensScored(Message, frozen=True):
    logprobs: list[TokenLogprobs]


class AbortRequests(Message, frozen=True):
    """End these requests now, with what they have. -> Done"""

    ids: list[str]


class Expire(Message, frozen=True):
    """End the requests that expire and hold a token older than this version. -> Done"""

    before: int


class Pause(Message, frozen=True):
    """Finish the forward pass or round under way, then generate nothing until Resume. -> Done

    A paused engine still takes requests and swaps."""


class Resume(Message, frozen=True):
    """Go on generating; no matter if it was never paused. -> Done"""


# Trainer


class StartTrainer(Message, frozen=True):
    """Load the model, or everything from a checkpoint directory. -> Done"""

    config: dict[str, Any]
    checkpoint: str | None


class TrainStep(Message, frozen=True):
    """One optimizer step; its weights become `version`. -> Stepped; Published follows"""

    batch: Batch
    version: int
    more: tuple[Batch, ...] = ()  # further minibatches: an optimizer update each, one version
    publish: bool = True


class Stepped(Message, frozen=True):
    version: int
    metrics: dict[str, float]
    skipped: tuple[int, ...] = ()  # which of the minibatches; their loss or gradient is not finite


class Published(Message, frozen=True):
    """Unasked: these weights lie ready for the engines."""

    update: WeightUpdate


class Lend(Message, frozen=True):
    """Let somebody who comes late have the newest version, too. -> Lent"""


class Lent(Message, frozen=True):
    """As Published; it wants a Release of its own."""

    update: WeightUpdate


class Release(Message, frozen=True):
    """One of those who were given this version does not read it any more. -> Done"""

    version: int


class SaveCheckpoint(Message, frozen=True):
    """Copy the state, say Copied, and write an atomic checkpoint directory. -> Saved"""

    directory: str
    run_state: dict[str, Any]  # the controller's share: task cursor and the like


class Copied(Part, frozen=True):
    """The next step may come; what it changes is not part of the checkpoint."""


class Saved(Message, frozen=True):
    """The checkpoint is on the disk."""

    version: int
    complaint: str | None = None  # why older ones could not be removed


# Scorer worker


class StartScorer(Message, frozen=True):
    """-> Done"""

    functions: dict[str, str]  # name -> reference "module:name", or path of a file this run pickled


class ScoreGroup(Message, frozen=True):
    """Run one reward function on the episodes of a group. -> Scored"""

    function: str
    prompts: list[Prompt]
    completions: list[Prompt]  # as TRL: text for text prompts, [assistant message] for chat prompts
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class GroupScored(Message, frozen=True):
    rewards: list[float | None]


# Reward model worker


class StartRewardModel(Message, frozen=True):
    """Load the model. -> Done"""

    settings: dict[str, Any]  # ModelSettings as plain data
    device: str  # of placement.scorers
    head: str  # "sequence" or "token"
    is_whole: bool  # it judges whole conversations, rather than steps
    separator: str | None = None  # put behind each step
    kept_tokens: int = 0  # whose states wait for what follows them


class StepReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sequence for a reward model, cut into steps: as tokens, or as text for another tokenizer.

    It is always sent whole. That the model may have read its beginning before only saves time.
    """

    tokens: np.ndarray | None = None  # [L] int32
    ends: list[int] = []  # last token of each step
    prompt: Prompt = ""  # else this text,
    pieces: list[str] = []  # and that of each step
    num_known: int = 0  # steps at the beginning whose values are not wanted again
    goes_on: bool = False  # further steps will come


class ReadSteps(Message, frozen=True):
    """-> StepValues"""

    readings: list[StepReading]


class StepValues(Message, frozen=True):
    values: list[list[float]]  # of each reading, of each step that was not known


# Teacher


class StartTeacher(Message, frozen=True):
    """Load the model. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    settings: dict[str, Any]  # ReaderSettings as plain data
    device: str  # of placement.scorers
    model_path: str
    num_known: int | None = None  # token ids it may name; None = those of the config's model
    following: dict[str, Any] | None = None  # Following as plain data; None = it never changes
    version: int | None = None  # of one that follows the policy: the Version it begins with
    adapter_path: str | None = None  # likewise, in a LoRA run: the adapter that goes on top
    past: str | None = None  # likewise: the file with what it was, for who takes its place


AnyMessage = (
    Stop
    | Done
    | Error
    | Hello
    | WorkerProgress
    | Failed
    | Join
    | JoinAdmitted
    | Ended
    | EndWorker
    | DumpStacks
    | Dumped
    | Beat
    | StartEngine
    | Generate
    | TokensSampled
    | Completed
    | GenerateDone
    | SwapWeights
    | Swapped
    | AbortRequests
    | Expire
    | Pause
    | Resume
    | StartTrainer
    | TrainStep
    | Stepped
    | Published
    | Lend
    | Lent
    | Release
    | SaveCheckpoint
    | Copied
    | Saved
    | StartScorer
    | ScoreGroup
    | GroupScored
    | StartRewardModel
    | ReadSteps
    | StepValues
    | StartTeacher
    | ScoreTokens
    | TokensScored
)
