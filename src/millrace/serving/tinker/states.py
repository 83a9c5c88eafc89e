"""The saved states of a tenant, `MODEL/weights/NAME` and `MODEL/sampler_weights/NAME`.

Promise: a state is listed only when it is complete, and a deleted one is gone at once. A state that
has expired is neither listed nor read. Any thread may list states; only the thread that saves
states deletes them.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millrace.core.errors import CheckpointError
from millrace.training.checkpoints.directory import HIDDEN, read_run_state

EXPIRES = "expires_s"  # in what a state says about itself: seconds since 1970, or None
_KINDS = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedState:
    folder: Path
    saved_s: float  # since 1970
    num_bytes: int
    about: dict[str, Any]

    @property
    def model(self) -> str:
        return self.folder.parts[-3]

    @property
    def kind(self) -> str:
        return _KINDS[self.folder.parts[-2]]

    @property
    def is_expired(self) -> bool:
        return _has_expired(self.about)

    def reply(self) -> dict[str, Any]:
        """A Checkpoint of the client."""
        expires_s, id = self.about.get(EXPIRES), "/".join(self.folder.parts[-2:])
        return {
            "checkpoint_id": id,
            "checkpoint_type": self.kind,
            "time": iso_time(self.saved_s),
            "tinker_path": f"tinker://{self.model}/{id}",
            "size_bytes": self.num_bytes,
            "expires_at": None if expires_s is None else iso_time(expires_s),
        }


def run_reply(
    id: str, states: list[SavedState], *, owner: str, trained: tuple[float, str, int] | None
) -> dict[str, Any]:
    """A TrainingRun of the client. `states`: the newest first; empty only while it trains.
    `trained`: when it was used, in s since 1970, its base model and its rank, while it trains."""
    if trained is None:
        newest = states[0]
        trained = newest.saved_s, newest.about["base_model"], newest.about["shape"]["rank"]
    (used_s, base, rank), last = trained, {state.kind: state.reply() for state in reversed(states)}
    kind = {"base_model": base, "is_lora": True, "lora_rank": rank, "model_owner": owner}
    saved = {
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
    }
    return {"training_run_id": id, "last_request_time": iso_time(used_s), **kind, **saved}


def saved_states(tenant_folder: Path) -> list[SavedState]:
    """The states that have not expired, the newest first."""
    found = [state for state in _all_states(tenant_folder) if not state.is_expired]
    return sorted(found, key=lambda state: state.saved_s, reverse=True)


def _all_states(tenant_folder: Path) -> Iterator[SavedState]:
    for folder in tenant_folder.glob("*/*/*"):
        try:
            if folder.parent.name in _KINDS and not folder.name.startswith(HIDDEN):
                yield SavedState(
                    folder=folder,
                    saved_s=folder.stat().st_mtime,
                    num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
                    about=read_run_state(folder),
                )
        except (OSError, json.JSONDecodeError):  # it was deleted meanwhile, or is damaged
            continue


def read_state(folder: Path) -> dict[str, Any]:
    """What a state says about itself; raises CheckpointError if it has expired or is gone."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no saved state {folder.name!r}; save it, or use another.")
    about = read_run_state(folder)
    if _has_expired(about):
        raise CheckpointError(
            f"The saved state {folder.name!r} expired at {iso_time(about[EXPIRES])}; use another"
            " one, or save with a larger ttl_seconds."
        )
    return about


def _has_expired(about: dict[str, Any]) -> bool:
    expires_s = about.get(EXPIRES)
    return expires_s is not None and expires_s < time.time()


def delete_state(folder: Path) -> None:
    hidden = folder.parent / f"{HIDDEN}deleted_{folder.name}"  # removed later if the process dies
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def delete_expired(tenant_folder: Path) -> None:
    for state in _all_states(tenant_folder):
        if state.is_expired:
            delete_state(state.folder)


def iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
