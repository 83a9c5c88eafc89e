"""Requests to the engines, made of bodies of the Tinker API."""

import secrets
import uuid
from pathlib import Path

import numpy as np

from millrace.core.errors import CheckpointError
from millrace.core.records import Request, Sampling
from millrace.serving.api.bodies import MIN_TEMPERATURE, MIN_TOP_P
from millrace.serving.api.errors import ApiError
from millrace.serving.clients import Client
from millrace.serving.served_model import ServedModel
from millrace.serving.tinker.states import read_state
from millrace.serving.tinker.wire import SampleBody


def sample_request(
    served: ServedModel, body: SampleBody, folder: Path | None, *, client: Client
) -> Request:
    """`folder`: of the adapter; None = the model itself. Called inside ServedModel.prepare()."""
    params = body.sampling_params
    room = served.check_room(body.num_tokens)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [
        stop if isinstance(stop, str) else served.prompt_text(np.array([stop])) for stop in stops
    ]
    return Request(
        id=uuid.uuid4().hex,
        prompt=body.tokens,
        sampling=Sampling(
            max_new_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
            top_k=max(params.top_k, 0),
            top_p=max(params.top_p, MIN_TOP_P),
            stop=tuple(texts),
            top_logprobs=body.topk_sample_logprobs,
        ),
        n=body.num_samples,
        seed=secrets.randbits(63) if params.seed is None else params.seed % 2**63,
        # A place in the engines holds one adapter after another, and a name may be saved again.
        cache_salt=f"{client.cache_salt}{folder or ''}{_saved_ns(folder)}",
    )


def _saved_ns(folder: Path | None) -> int:
    if folder is None:
        return 0
    try:
        read_state(folder)
        return folder.stat().st_mtime_ns
    except CheckpointError as error:
        raise ApiError(str(error), status=404) from None
    except OSError:  # meanwhile
        raise ApiError("The weights of the sampler were deleted.", status=404) from None
