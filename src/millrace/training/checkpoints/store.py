"""Copies of checkpoints at a URL that fsspec reaches: object storage or another disk.

Promise: a checkpoint counts only once its manifest is there. The manifest is uploaded last, after
the sizes of all other files have been compared, and it is removed first. A checkpoint is used only
after all of its files have been downloaded and their checksums compared. So an upload or a download
that was interrupted anywhere is never resumed from, and the next one starts again.

One process uploads at a time. Credentials and endpoints come from the environment, as fsspec and
the libraries of the stores read them. Torch-free; any thread may call it.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import msgspec

from millrace.core import files as storage
from millrace.core.errors import CheckpointError, ConfigError
from millrace.training.checkpoints.directory import (
    CHECKPOINTS,
    HIDDEN,
    MANIFEST_FILE,
    FoundCheckpoint,
    damage_to,
    move_into_place,
    newest_checkpoint,
    read_manifest,
)

_UPLOAD = ".upload_"  # prefix of a folder with further names of the files being uploaded


class CheckpointStore:
    def __init__(self, url: str) -> None:
        """Connects later; raises ConfigError for a store that fsspec cannot open."""
        import fsspec  # only here: most runs have no store

        if urlsplit(url).password is not None:
            raise ConfigError(
                "checkpoint.path has a password, and the run saves its settings; put credentials"
                " into the environment."
            )
        self.url = url.rstrip("/")
        self._is_closed = False
        options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
        try:
            self._fs, self._root = fsspec.url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"checkpoint.path = {url!r} needs a package that is not installed ({error});"
                " install it, for S3 with `pip install 'millrace[s3]'`."
            ) from None
        except ValueError as error:
            raise ConfigError(f"checkpoint.path = {url!r} cannot be used: {error}.") from None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        with self._errors("cannot be read"):
            return self._steps()

    def upload(self, directory: Path, *, keep: int) -> None:
        """Copy a checkpoint, which may be pruned meanwhile, and keep the `keep` newest."""
        with self._errors(f"did not take {directory.name}"), _held(directory) as held:
            self._upload(held, directory.name)
            self._prune(keep, newest=int(directory.name.removeprefix("step_")))

    def download(self, step: int, folder: Path) -> str | None:
        """Copy a checkpoint into RUN_DIR/checkpoints; returns why it is damaged, after "it "."""
        name = f"step_{step}"
        unfinished = folder / f"{HIDDEN}{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with self._errors(f"did not provide {name}"):
                self._download(f"{self._root}/{name}", unfinished)
                if (damage := damage_to(unfinished)) is None:
                    storage.sync_all(unfinished)
                    move_into_place(unfinished, folder / name)
                return damage
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        """Let an upload end before its next file."""
        self._is_closed = True

    def _steps(self) -> list[int]:
        return [step for step in self._begun() if MANIFEST_FILE in self._names(f"/step_{step}")]

    def _begun(self) -> list[int]:
        """Steps of all checkpoints, in order, whether they are complete or not."""
        self._fs.invalidate_cache()
        matches = (re.fullmatch(r"step_(\d+)", name) for name in self._names())
        return sorted(int(match[1]) for match in matches if match)

    def _names(self, path: str = "") -> list[str]:
        # exists() and find() of fsspec would take an error of the store for an absent file.
        try:
            paths = self._fs.ls(f"{self._root}{path}", detail=False)
        except FileNotFoundError:
            return []
        return [PurePosixPath(path).name for path in paths]

    def _upload(self, directory: Path, name: str) -> None:
        data, files = (directory / MANIFEST_FILE).read_bytes(), read_manifest(directory)
        target = f"{self._root}/{name}"
        self._fs.invalidate_cache()
        if MANIFEST_FILE in self._names(f"/{name}"):
            if self._fs.cat_file(f"{target}/{MANIFEST_FILE}") == data:
                return
            self._fs.rm_file(f"{target}/{MANIFEST_FILE}")  # a resumed run has repeated this step
        for path in files:
            if self._is_closed:
                raise OSError("the run has ended")
            self._fs.put_file(str(directory / path), f"{target}/{path}")
        self._fs.invalidate_cache()
        for path, file in files.items():
            if (size := self._fs.size(f"{target}/{path}")) != file.bytes:
                raise OSError(f"{path} has {size} bytes there instead of {file.bytes}")
        self._fs.pipe_file(f"{target}/{MANIFEST_FILE}", data)

    def _prune(self, keep: int, *, newest: int) -> None:
        """Remove older checkpoints than `newest`, and leftovers of interrupted uploads. Later ones
        are of a run that was resumed before them, because they are damaged."""
        complete = [step for step in self._steps() if step <= newest]
        for step in self._begun():
            if step < newest and step not in complete[-keep:]:
                folder = f"{self._root}/step_{step}"
                if step in complete:
                    self._fs.rm_file(f"{folder}/{MANIFEST_FILE}")
                self._fs.rm(folder, recursive=True)

    def _download(self, source: str, folder: Path) -> None:
        """Download the files that the manifest lists; damage_to() finds what is wrong with them."""
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).write_bytes(self._fs.cat_file(f"{source}/{MANIFEST_FILE}"))
        with contextlib.suppress(msgspec.MsgspecError):
            files = read_manifest(folder)
            num_bytes = sum(file.bytes for file in files.values())
            if shutil.disk_usage(folder).free < num_bytes:
                raise OSError(f"{str(folder.parent)!r} has no room for {num_bytes / 1e9:.3g} GB")
            for name in files:
                path = folder / name
                if path.resolve().is_relative_to(folder.resolve()):  # a manifest may be hostile
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.get_file(f"{source}/{name}", str(path))

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Each store has exceptions of its own."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"checkpoint.path = {self.url!r} {what} ({storage.reason(error)}); check that it"
                " can be reached and that the credentials of this process allow it."
            ) from error


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[Path]:
    """The directory under another name, if possible, so that its files outlive its pruning."""
    for leftover in directory.parent.glob(f"{_UPLOAD}*"):  # of a killed process
        shutil.rmtree(leftover)
    held = directory.parent / f"{_UPLOAD}{directory.name}"
    try:
        with contextlib.suppress(OSError):  # some disks have no hard links
            shutil.copytree(directory, held, copy_function=os.link)
        yield held if (held / MANIFEST_FILE).is_file() else directory
    finally:
        shutil.rmtree(held, ignore_errors=True)


def newest_with_store(run_dir: Path, store: CheckpointStore) -> FoundCheckpoint:
    """newest_checkpoint(), after a newer one in the store has been downloaded. A store that cannot
    be read is an error if the run directory has no checkpoint either."""
    found = newest_checkpoint(run_dir)
    own_step = -1 if found.directory is None else int(found.directory.name.removeprefix("step_"))
    refused: list[str] = []
    try:
        for step in reversed(store.steps()):
            if step <= own_step:
                break
            damage = store.download(step, run_dir / CHECKPOINTS)
            if damage is None:
                return FoundCheckpoint(
                    directory=run_dir / CHECKPOINTS / f"step_{step}", refused=tuple(refused)
                )
            refused.append(f"Checkpoint '{store.url}/step_{step}' is not used: it {damage}.")
    except CheckpointError as error:
        if found.directory is None:
            raise
        refused.append(str(error))
    return FoundCheckpoint(directory=found.directory, refused=(*refused, *found.refused))
