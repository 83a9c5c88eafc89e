"""What each preset must be: the design of its library, written down a second time and by hand.

Tests compare these with the settings of the presets, and with what runs of them do. Change an entry
only together with a file and a revision of the library that say so, which its preset names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millrace.config import Interrupt, RunConfig

PER_TOKEN, PER_SEQUENCE = {"type": "dapo", "high": 0.2}, {"type": "grpo"}
TRUNCATED = {"anchor": "proximal", "correction": "truncate", "correction_high": 2.0}
DECOUPLED = {"type": "decoupled_ppo"}


@dataclass(frozen=True, kw_only=True)
class Signature:
    interrupt: Interrupt
    transport: Literal["collective", "disk", "shm"]
    payload: Literal["full", "delta"] = "full"
    kv: Literal["keep", "recompute"] = "keep"  # of sequences that an update finds running
    limit: int  # of the staleness, in versions
    enforce: Literal["wait", "cancel", "take"] = "wait"
    order: Literal["in_order", "oldest", "ready"]
    capacity: int | str  # of the buffer, in groups or batches
    running: int | str = 64  # groups at a time; 64 is Millrace's default
    has_adapter: bool = False
    loss: Mapping[str, Any]


SIGNATURES = {
    "areal": Signature(
        interrupt="abort",
        transport="collective",
        kv="recompute",
        limit=4,
        order="oldest",
        capacity="5 batches",
        running="1 batch",
        loss={**DECOUPLED, "correction": "mask", "correction_high": 5.0},
    ),
    "art": Signature(
        interrupt="barrier",
        transport="disk",
        limit=0,
        order="in_order",
        capacity="1 batch",
        running="1 batch",
        has_adapter=True,
        loss={"type": "cispo"},
    ),
    "art_pipeline": Signature(
        interrupt="swap",
        transport="disk",
        limit=4,
        enforce="take",
        order="ready",
        capacity="4 batches",
        running=16,
        has_adapter=True,
        loss={"type": "cispo"},
    ),
    "atropos": Signature(
        interrupt="drain",
        transport="disk",
        limit=3,
        order="ready",
        capacity="3 batches",
        loss=PER_SEQUENCE,
    ),
    "miles": Signature(
        interrupt="save",
        transport="collective",
        kv="recompute",
        limit=1000,
        enforce="take",
        order="ready",
        capacity="2 batches",
        running="1 batch",
        loss={**PER_SEQUENCE, **TRUNCATED},
    ),
    "nemo_rl": Signature(
        interrupt="swap",
        transport="collective",
        limit=1,
        order="in_order",
        capacity="2 batches",
        running="1 batch",
        loss={**PER_TOKEN, **TRUNCATED, "correction_high": math.inf},
    ),
    "oat": Signature(
        interrupt="drain",
        transport="collective",
        limit=1,
        order="in_order",
        capacity="1 batch",
        loss={"type": "dr_grpo", **TRUNCATED},
    ),
    "open_instruct": Signature(
        interrupt="save",
        transport="collective",
        limit=8,
        enforce="take",
        order="ready",
        capacity="8 batches",
        running="8 batches",
        loss={"type": "dapo", "high": 0.272, **TRUNCATED},
    ),
    "pipeline_rl": Signature(
        interrupt="swap",
        transport="collective",
        limit=8,
        order="ready",
        capacity=256,
        loss={"type": "tis", "cap": 5.0, "aggregation": "constant"},
    ),
    "prime_rl": Signature(
        interrupt="save",
        transport="disk",
        limit=8,
        enforce="cancel",
        order="ready",
        capacity="2 batches",
        loss={"type": "prime_rl"},
    ),
    "roll": Signature(
        interrupt="abort",
        transport="collective",
        kv="recompute",
        limit=1,
        order="oldest",
        capacity="2 batches",
        loss={
            "type": "topr",
            "good_by": "score",
            "ratio": "token",
            "anchor": "proximal",
            "aggregation": "sequence",
        },
    ),
    "skyrl": Signature(
        interrupt="save",
        transport="collective",
        limit=4,
        order="ready",
        capacity="5 batches",
        running="5 batches",
        loss={"type": "icepop", "floor": 0.8, "cap": 1.2},
    ),
    "slime": Signature(
        interrupt="drain",
        transport="disk",
        payload="delta",
        limit=1,
        order="in_order",
        capacity="1 batch",
        loss={**PER_SEQUENCE, **TRUNCATED},
    ),
    "torchforge": Signature(
        interrupt="drain",
        transport="shm",
        limit=1,
        enforce="take",
        order="ready",
        capacity="unbounded",
        loss={**PER_SEQUENCE, "anchor": "proximal"},
    ),
    "trl_async": Signature(
        interrupt="save",
        transport="collective",
        limit=4,
        enforce="take",
        order="ready",
        capacity=128,
        running="4 batches",
        loss=PER_TOKEN,
    ),
    "trl_sync": Signature(
        interrupt="barrier",
        transport="collective",
        limit=0,
        order="in_order",
        capacity="1 batch",
        running="1 batch",
        loss={
            **PER_TOKEN,
            "anchor": "proximal",
            "correction": "mask",
            "correction_level": "sequence",
            "correction_high": 3.0,
        },
    ),
    "tunix": Signature(
        interrupt="drain",
        transport="shm",
        limit=1,
        order="ready",
        capacity="2 batches",
        loss=PER_SEQUENCE,
    ),
    "verifiers_rl": Signature(
        interrupt="drain",
        transport="collective",
        limit=1,
        order="in_order",
        capacity="1 batch",
        loss={"type": "icepop", "floor": 0.125, "cap": 8.0},
    ),
    "verl": Signature(
        interrupt="abort",
        transport="collective",
        kv="recompute",
        limit=7,
        enforce="take",
        order="oldest",
        capacity="1 batch",
        running="1 batch",
        loss={**DECOUPLED, "dual": 3.0, "correction_high": 2.0},
    ),
}


def signature_of(config: RunConfig) -> Signature:
    assert config.buffer.staleness["type"] == "oldest"
    return Signature(
        interrupt=config.weights.interrupt,
        transport=config.weights.transport,
        payload=config.weights.payload,
        kv=config.engine.kv,
        limit=config.buffer.max_staleness,
        enforce=config.buffer.staleness.get("enforce", "wait"),
        order=config.buffer.order["type"],
        capacity=config.buffer.capacity,
        running=config.rollout.max_running_groups,
        has_adapter=config.lora is not None,
        loss=config.loss,
    )
