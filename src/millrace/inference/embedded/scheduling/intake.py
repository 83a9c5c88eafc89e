"""Which requests an engine takes: those it can serve to their end."""

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Request
from millrace.inference.embedded.lora.bank import AdapterBank


def check_request(request: Request, *, max_context: int, vocab_size: int) -> None:
    """Refuse what can never be served, in one sentence."""
    num_prompt, sampling = len(request.prompt), request.sampling
    if num_prompt == 0:
        raise TaskError(f"Request {request.id!r} has an empty prompt.")
    if num_prompt >= max_context:
        raise TaskError(
            f"The prompt of request {request.id!r} has {num_prompt} tokens, and the context of"
            f" {max_context} has no room for one more; shorten it or raise"
            " engine.max_context (and engine.kv_bytes, if that bounds it)."
        )
    if request.prompt.min() < 0 or request.prompt.max() >= vocab_size:
        raise TaskError(
            f"The prompt of request {request.id!r} has token ids outside"
            f" 0..{vocab_size - 1}; is its tokenizer the model's own?"
        )
    if request.n < 1 or sampling.max_new_tokens < 1 or "" in sampling.stop:
        raise TaskError(
            f"Request {request.id!r} needs n and max_new_tokens of at least 1, and no empty"
            f" stop string; it has {request.n}, {sampling.max_new_tokens}, {sampling.stop}."
        )
    if request.partial is not None:
        _check_partial(request, request.partial)


def _check_partial(request: Request, partial: Completion) -> None:
    if request.n != 1:
        raise TaskError(f"Request {request.id!r} resumes one completion but asks {request.n}.")
    if request.sampling.truncates != (partial.kept is not None) and len(partial.tokens):
        raise TaskError(
            f"Request {request.id!r} resumes a completion that was sampled with other"
            " truncation; resume it with the settings it began with."
        )


def adapter_slot(request: Request, bank: AdapterBank | None) -> int:
    """Where the adapter that the request chose is kept; refuses one that is not there."""
    if bank is not None:
        return bank.slot_of(request.adapter)
    if request.adapter is not None:
        raise TaskError(
            f"There is no adapter {request.adapter!r}; this engine has only the policy. Name"
            " others in engine.adapters, or set lora.apply to 'unmerged' for 'base'."
        )
    return 0
