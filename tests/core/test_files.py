import errno
import os
from pathlib import Path

import pytest

from millrace.core import files as storage


def test_reason_is_the_message_of_the_operating_system_in_the_context():
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert storage.reason(error) == "no space left on device"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Bad header.\nsecond line"), "Bad header"),
        (OSError("the disk is too full"), "the disk is too full"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_reason_without_one_is_the_first_line_of_the_error(error: BaseException, reason: str):
    assert storage.reason(error) == reason


def test_sync_of_a_missing_path_raises(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("here")
    storage.sync_all(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.sync(tmp_path / "absent")
