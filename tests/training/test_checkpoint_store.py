"""Copies of checkpoints in a store, here in folders and in the memory of the process."""

import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fake_checkpoint import write_fake_checkpoint
from fsspec.implementations.memory import MemoryFileSystem
from tiny_model import make_tiny_model

from millrace.config import load_config
from millrace.controller.checkpointing import CheckpointUploads
from millrace.core.errors import CheckpointError, ConfigError
from millrace.run.resume import find_resume_point
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.directory import damage_to, read_run_state, write_checkpoint
from millrace.training.checkpoints.store import CheckpointStore, newest_with_store


class FailingStore(MemoryFileSystem):
    """Fails after some changes, as if its client had been killed."""

    protocol = "failing"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    room = 1000  # number of changes that succeed
    error: Exception = ConnectionResetError("gone")

    def _change(self) -> None:
        type(self).room -= 1
        if type(self).room < 0:
            raise self.error

    def put_file(self, *args, **kwargs):
        self._change()
        return super().put_file(*args, **kwargs)

    def pipe_file(self, *args, **kwargs):
        self._change()
        return super().pipe_file(*args, **kwargs)

    def rm_file(self, path):
        self._change()
        return super().rm_file(path)

    def _rm(self, path):
        self._change()
        return super()._rm(path)


fsspec.register_implementation("failing", FailingStore, clobber=True)


@pytest.fixture
def failing(monkeypatch) -> type[FailingStore]:
    FailingStore.store.clear()
    FailingStore.pseudo_dirs[:] = [""]
    monkeypatch.setattr(FailingStore, "room", 1000)
    return FailingStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/store/run/")


def checkpoint(run_dir: Path, step: int, **state) -> Path:
    directory = run_dir / "checkpoints" / f"step_{step}"
    write_fake_checkpoint(directory, run_state={"version": step, **state})
    return directory


def upload(store: CheckpointStore, run_dir: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        store.upload(checkpoint(run_dir, step), keep=keep)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_checkpoint_is_found_on_a_machine_with_an_empty_run_dir(tmp_path, store):
    upload(store, tmp_path / "a", 1, 2, 10)
    assert store.steps() == [1, 2, 10]
    found = newest_with_store(tmp_path / "b", store)
    assert found.directory == tmp_path / "b" / "checkpoints" / "step_10"
    assert found.refused == ()
    assert damage_to(found.directory) is None
    assert read_run_state(found.directory) == {"version": 10}
    assert names(tmp_path / "b" / "checkpoints") == {"step_10"}
    assert names(tmp_path / "a" / "checkpoints") == {"step_1", "step_2", "step_10"}


def test_newer_of_run_dir_and_store_is_used(tmp_path, store):
    upload(store, tmp_path / "a", 4)
    newer = checkpoint(tmp_path / "b", 5)
    assert newest_with_store(tmp_path / "b", store).directory == newer
    shutil.rmtree(newer)
    checkpoint(tmp_path / "b", 3)
    assert newest_with_store(tmp_path / "b", store).directory.name == "step_4"


def test_store_keeps_as_many_checkpoints_as_the_run_and_no_leftovers(tmp_path, store):
    upload(store, tmp_path / "run", 1, 2, keep=2)
    leftover = tmp_path / "store" / "run" / "step_3"
    (leftover / "merged").mkdir(parents=True)
    (leftover / "merged" / "model.safetensors").write_bytes(b"12")
    upload(store, tmp_path / "run", 4, keep=2)
    assert store.steps() == [2, 4]
    assert names(tmp_path / "store" / "run") == {"step_2", "step_4"}


def test_damaged_copy_is_named_and_the_one_before_is_used(tmp_path, store):
    upload(store, tmp_path / "a", 1, 2, 3, 4, keep=4)
    copies = tmp_path / "store" / "run"
    (copies / "step_2" / "trainer_state.pt").write_text("[]")
    (copies / "step_3" / "trainer_state.pt").unlink()
    (copies / "step_4" / "manifest.json").write_text('{"files": ')
    found = newest_with_store(tmp_path / "b", store)
    assert found.directory.name == "step_1"
    assert [text.partition(" is not used: it ")[2][:16] for text in found.refused] == [
        "has a manifest.j",
        "has no trainer_s",
        "has a damaged tr",
    ]
    assert names(tmp_path / "b" / "checkpoints") == {"step_1"}


def test_damaged_newest_copy_does_not_displace_those_of_the_resumed_run(tmp_path, store):
    upload(store, tmp_path / "first", 20, 30)
    (tmp_path / "store/run/step_30/trainer_state.pt").write_text("damaged")
    upload(store, tmp_path / "resumed", 21, 22, keep=1)
    assert store.steps() == [22, 30]
    assert newest_with_store(tmp_path / "other", store).directory == (
        tmp_path / "other" / "checkpoints" / "step_22"
    )


def test_manifest_cannot_name_files_elsewhere(tmp_path, store):
    upload(store, tmp_path / "a", 1)
    manifest = tmp_path / "store" / "run" / "step_1" / "manifest.json"
    (tmp_path / "store" / "run" / "evil").write_text("x")
    manifest.write_text(
        manifest.read_text().replace(
            '"config.json"', '"../evil": {"bytes": 1, "xxh3": ""},"config.json"'
        )
    )
    found = newest_with_store(tmp_path / "b", store)
    assert (found.directory, len(found.refused)) == (None, 1)
    assert names(tmp_path / "b" / "checkpoints") == set()


def test_upload_interrupted_anywhere_leaves_a_complete_checkpoint_or_none(tmp_path, failing):
    """Step 1 is stored; then step 2 replaces it, and a repeated step 2 replaces that."""
    store = CheckpointStore("failing://bucket/run")
    upload(store, tmp_path / "a", 1)
    first = checkpoint(tmp_path / "a", 2)
    outcomes = []
    for again in (False, True):
        if again:
            checkpoint(tmp_path / "a", 2, again=True)
        for room in range(20):
            failing.room = room
            try:
                store.upload(first, keep=1)
            except CheckpointError:
                is_stored = False
            else:
                is_stored = True
            failing.room = 1000
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
            found = newest_with_store(tmp_path / "b", store)
            assert found.refused == ()
            state = read_run_state(found.directory) if found.directory else None
            outcomes.append(state)
            if is_stored:
                assert state == ({"version": 2, "again": True} if again else {"version": 2})
                break
        assert is_stored
        assert store.steps() == [2]
    assert outcomes[0] == {"version": 1}
    assert None in outcomes  # a repeated step withdraws its checkpoint while it is replaced


def test_files_of_a_checkpoint_that_is_pruned_meanwhile_are_uploaded(
    tmp_path, failing, monkeypatch
):
    store = CheckpointStore("failing://bucket/run")
    directory = checkpoint(tmp_path / "a", 1)
    prune = lambda self: shutil.rmtree(directory, ignore_errors=True)  # noqa: E731
    monkeypatch.setattr(failing, "_change", prune)
    store.upload(directory, keep=1)
    assert names(tmp_path / "a" / "checkpoints") == set()
    assert newest_with_store(tmp_path / "b", store).directory.name == "step_1"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://bucket/run", "Protocol not known: nosuch"),
        ("/mnt/run", "is not a URL, such as s3://bucket/run"),
        ("s3://key:secret@bucket/run", "checkpoint.path has a password"),
    ],
)
def test_unusable_urls_are_one_sentence(url, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        CheckpointStore(load_config({"model": "m", "checkpoint": {"path": url}}).checkpoint.path)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_store_that_cannot_be_read_is_an_error_only_without_another_checkpoint(tmp_path, failing):
    store = CheckpointStore("failing://bucket/run")
    upload(store, tmp_path / "a", 7)
    monkey = pytest.MonkeyPatch()

    def refuse(self, *args, **kwargs):
        raise PermissionError("Access Denied")

    with monkey.context() as patch:
        patch.setattr(failing, "ls", refuse)
        with pytest.raises(CheckpointError, match=r"cannot be read \(Access Denied\); check that"):
            newest_with_store(tmp_path / "b", store)
        own = checkpoint(tmp_path / "b", 1)
        found = newest_with_store(tmp_path / "b", store)
        assert found.directory == own
        assert "Access Denied" in found.refused[0]


def test_new_run_does_not_mix_with_another_in_the_store(tmp_path, store):
    upload(store, tmp_path / "a", 7)
    settings = {"model": "m", "run_dir": str(tmp_path / "b"), "checkpoint": {"path": store.url}}
    with pytest.raises(ConfigError, match=r"already holds a checkpoint of step 7; choose another"):
        find_resume_point(load_config(settings), TaskStream, resume=False)


def test_checkpoint_of_another_model_is_one_sentence(tmp_path):
    def write(folder: Path) -> None:
        make_tiny_model(folder, num_experts=4)
        (folder / "trainer_state.pt").write_text("{}")

    state = {"version": 1, "next_number": 0, "unfinished": []}
    directory = tmp_path / "run" / "checkpoints" / "step_1"
    write_checkpoint(directory, write=write, run_state=state, needed_bytes=0)
    model = make_tiny_model(tmp_path / "model")
    config = load_config({"model": str(model), "run_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError) as caught:
        find_resume_point(config, TaskStream, resume=True)
    assert str(caught.value) == (
        f"{str(directory)!r} holds a model whose model_type is 'qwen3_moe', and that of model.path"
        f" = {str(model)!r} is 'qwen3'; resume with the model that the run began with."
    )


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def uploads(failing, warnings) -> CheckpointUploads:
    store = CheckpointStore("failing://bucket/run")
    return CheckpointUploads(store, keep=2, warn=warnings.append, retry_delays_s=(0.0, 0.0))


async def test_failed_uploads_are_retried_and_warned_about_once(
    tmp_path, failing, uploads, warnings
):
    failing.room = 0
    uploads.add(checkpoint(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"did not take step_1 \(gone\); check that it can"):
        await uploads.finish()
    assert uploads.num_failed == 3
    assert len(warnings) == 1
    assert warnings[0].endswith("The run continues and tries again.")
    failing.room = 1000
    uploads.add(checkpoint(tmp_path, 2))
    await uploads.finish()
    assert uploads.num_failed == 3


async def test_newest_of_waiting_checkpoints_is_uploaded(tmp_path, failing, uploads, warnings):
    for step in (1, 2, 3):
        uploads.add(checkpoint(tmp_path, step))
    await uploads.finish()
    assert CheckpointStore("failing://bucket/run").steps() == [3]
    assert warnings == []


async def test_closing_ends_an_upload(tmp_path, failing, uploads):
    uploads.close()
    uploads.add(checkpoint(tmp_path, 1))
    with pytest.raises(CheckpointError, match="the run has ended"):
        await uploads.finish()
