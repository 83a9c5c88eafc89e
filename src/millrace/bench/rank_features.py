"""What `millrace bench ranks` compares: the meshes and the features, by the names of its table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.core.microbatch import MeshSizes
from millrace.training.losses.recipes import PREFERENCE, RECIPES, SUPERVISED

# Texts of few ids of a small vocabulary: gradients of tokens add up rather than cancel, and float32
# resolves logprobs near -log(VOCAB) to a few 1e-7. Otherwise one rank alone has errors of 1e-6.
VOCAB, LAST_ID, LAYERS, NUM_EXPERTS, TOP_K = 48, 8, 2, 8, 2
# Adam's first steps would turn rounding errors of tiny gradients into whole steps.
SGD = {"type": "torch.optim:SGD", "learning_rate": 2e-3, "momentum": 0.9}
SMOOTH = {"loss": {"type": "grpo", "low": 1.0, "high": math.inf}}  # rounding clips no other token
BFLOAT16 = {"trainer": {"dtype": "bfloat16"}, **SMOOTH}
CRITIC = {"scoring": {"advantages": {"type": "gae"}}, "critic": {"learning_rate": 1e-3}}
ONE_RANK = "one rank"  # compared with itself: it does the same work in another process
MESHES = {
    ONE_RANK: MeshSizes(),
    "fsdp 1": MeshSizes(),  # the code of several ranks; on a GPU, over NCCL
    "fsdp 2": MeshSizes(dp_shard=2),
    "fsdp 4": MeshSizes(dp_shard=4),
    "hsdp 2x2": MeshSizes(dp_replicate=2, dp_shard=2),
    "cp 2": MeshSizes(cp=2),
    "cp 4": MeshSizes(cp=4),
    "cp 2 fsdp 2": MeshSizes(cp=2, dp_shard=2),
    "cp 2 hsdp 2": MeshSizes(dp_replicate=2, cp=2),
    "cp 2 tp 2": MeshSizes(cp=2, tp=2),
    "cp 2 ep 2": MeshSizes(cp=2, ep=2),
    "cp 2 ep 2 fsdp 2": MeshSizes(dp_shard=2, cp=2, ep=2),
    "tp 2": MeshSizes(tp=2),
    "tp 4": MeshSizes(tp=4),
    "tp 2 fsdp 2": MeshSizes(dp_shard=2, tp=2),
    "tp 2 hsdp 2": MeshSizes(dp_replicate=2, tp=2),
    "ep 2": MeshSizes(dp_shard=2, ep=2),
    "ep 4": MeshSizes(dp_shard=4, ep=4),
    "ep 2 fsdp 4": MeshSizes(dp_shard=4, ep=2),
    "ep 2 hsdp 2x2": MeshSizes(dp_replicate=2, dp_shard=2, ep=2),
    "tp 2 ep 2": MeshSizes(dp_shard=2, tp=2, ep=2),
    "cp 2 tp 2 ep 2": MeshSizes(cp=2, tp=2, ep=2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the run
    is_mixture: bool = False
    minibatches: int = 1
    num_groups: int = 4  # of 2 to 4 rollouts, so that shares are uneven
    num_kept: int = 0  # ids that truncated sampling kept
    has_routes: bool = False  # of the engine, which are replayed
    has_gaps: bool = False  # routes are unknown at some tokens, and a second version resumed
    has_both_signs: bool = False  # advantages; their gradients partly cancel
    has_bad_scores: bool = False  # of the first episode of each group
    has_held_out: bool = False  # a batch whose loss alone is compared
    rounds_updates: bool = False  # to 16 bits, however it computes gradients
    has_reference: bool = True  # in the rollouts; without it, the base of an adapter is one

    @property
    def is_half(self) -> bool:
        return "dtype" in self.settings.get("trainer", {})

    @property
    def has_float64(self) -> bool:  # torch has no grouped products of experts in float64
        return not (self.is_mixture or self.is_half or self.rounds_updates)

    def fits(self, sizes: MeshSizes) -> bool:
        """Whether a mesh can train it: only mixtures share experts."""
        return self.is_mixture or sizes.ep == 1


FEATURES = {
    **{name: Feature(settings={"loss": {"type": name}}) for name in (*RECIPES, PREFERENCE)},
    SUPERVISED: Feature(settings={"loss": {"type": SUPERVISED}}, has_held_out=True),
    "reference": Feature(settings={"loss": {"type": "grpo", "kl": 0.1}}),
    "teacher's top k": Feature(settings={"loss": {"type": "distil", "distil": "forward_kl"}}),
    "baseline": Feature(settings={"loss": {"type": "vcpo", "minimum_variance_baseline": True}}),
    "scale by sequences": Feature(settings={"loss": {"type": "vcpo", "ess_scaling": "sequence"}}),
    "good by score": Feature(
        settings={"loss": {"type": "topr", "good_by": "score"}}, has_bad_scores=True
    ),
    "entropy bonus": Feature(settings={"loss": {"type": "grpo", "entropy_bonus": 1.0}}),
    "critic": Feature(settings=CRITIC),
    # The second update starts from weights that differ by rounding, times the learning rate.
    "minibatches": Feature(
        settings={"loss": {"type": "decoupled_ppo"}, "optimizer": {**SGD, "learning_rate": 1e-4}},
        minibatches=2,
    ),
    "lora": Feature(
        settings={"lora": {"rank": 4}, "loss": {"type": "grpo", "kl": 0.1}}, has_reference=False
    ),
    "dora": Feature(settings={"lora": {"rank": 4, "dora": True}}),
    # Its Newton-Schulz iteration multiplies in bfloat16 and amplifies small singular values.
    "muon": Feature(
        settings={"optimizer": {"type": "muon", "learning_rate": 2e-3}}, rounds_updates=True
    ),
    "both signs": Feature(has_both_signs=True),
    "kept ids": Feature(num_kept=30),
    "checkpointing": Feature(settings={"trainer": {"gradient_checkpointing": True}}),
    # Layers are gathered in 16 bits; ranks round as one rank does, and sum in float32.
    "bfloat16": Feature(settings=BFLOAT16),
    "bfloat16 critic": Feature(settings={**CRITIC, **BFLOAT16}),
    "bfloat16 mixture": Feature(
        settings={"trainer": {"dtype": "bfloat16", "gradient_checkpointing": True}, **SMOOTH},
        is_mixture=True,
        has_routes=True,
    ),
    "bfloat16 lora": Feature(
        settings={"lora": {"rank": 4}, **BFLOAT16}, is_mixture=True, has_routes=True
    ),
    "bfloat16 dora": Feature(settings={"lora": {"rank": 4, "dora": True}, **BFLOAT16}),
    "float16": Feature(settings={"trainer": {"dtype": "float16"}, **SMOOTH}),
    "kept ids, one group": Feature(num_kept=30, num_groups=1),
    "one group": Feature(num_groups=1),  # some ranks have nothing to train
    "mixture": Feature(is_mixture=True),
    "route replay": Feature(is_mixture=True, has_routes=True, has_gaps=True),
    "router loss": Feature(
        settings={"trainer": {"router_aux_loss": 1.0}}, is_mixture=True, has_routes=True
    ),
    "lora of experts": Feature(
        settings={"lora": {"rank": 4}, "trainer": {"router_aux_loss": 0.1}},
        is_mixture=True,
        has_routes=True,
    ),
}
