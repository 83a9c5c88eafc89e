"""How the ranks of a trainer share its work: the sizes of the mesh and the order of the ranks.

Ranks count through the mesh with tp fastest, then cp, dp_shard and dp_replicate. Ranks that differ
in tp or cp alone compute the same microbatches together; all others have microbatches of their own.
Torch-free.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    dp_replicate: int = 1  # copies of the sharded model
    dp_shard: int = 1  # ranks that FSDP shards weights, gradients and optimizer state over
    cp: int = 1  # ranks that share the rows of a microbatch; FSDP shards over them, too
    tp: int = 1  # ranks that share each matrix product
    ep: int = 1  # ranks that share the experts; divides dp_shard * cp

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Number of different shares of a batch."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """The share of a batch that a rank computes."""
        return rank // (self.cp * self.tp)
