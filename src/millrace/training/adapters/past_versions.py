"""The last versions of an adapter, which roles with a `lag` play.

Promise: a checkpoint holds all of them, so a resumed run has the same. Used by the trainer's
thread; any thread may call what writer() returns.
"""

from pathlib import Path

from torch import Tensor

from millrace.models.lora.folders import read_checkpoint
from millrace.training.checkpoints.directory import PAST, past_folders
from millrace.training.checkpoints.snapshot import Write
from millrace.training.policy_model import PolicyModel


class PastVersions:
    def __init__(
        self, policy: PolicyModel, *, lag: int, version: int, checkpoint: Path | None
    ) -> None:
        """`lag`: of the oldest that is kept. `version`: of the policy, as of its `checkpoint`."""
        self._policy, self._lag = policy, lag
        folders = {} if checkpoint is None else past_folders(checkpoint)
        self._kept: dict[int, dict[str, Tensor]] = {  # by version, ascending
            saved: {name: t.to(policy.device) for name, t in read_checkpoint(folder).items()}
            for saved, folder in folders.items()
        }
        self.add(version)

    def add(self, version: int) -> None:
        """Keep the weights that the policy has now."""
        if version in self._kept:
            return
        self._kept[version] = {name: w.clone() for name, w in self._policy.weights().items()}
        for old in [v for v in self._kept if v < version - self._lag]:
            del self._kept[old]

    def behind(self, lag: int) -> tuple[int, dict[str, Tensor]]:
        """The version `lag` versions ago, or the oldest that is kept, and its weights."""
        version = max(max(self._kept) - lag, min(self._kept))
        return version, self._kept[version]

    def writer(self) -> Write:
        """A function that writes all versions kept now into the folder of a checkpoint."""
        kept = dict(self._kept)

        def write(folder: Path) -> None:
            for version, weights in kept.items():
                self._policy.write_adapter(weights, folder / PAST / str(version))

        return write
