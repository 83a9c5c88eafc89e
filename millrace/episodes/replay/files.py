"""Files of recordings: a line for each, which also says what became of the episode in its run."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from millrace.core.errors import ConfigError
from millrace.episodes.replay.schema import Recording, Row, encode


class Line(Row, frozen=True, kw_only=True):
    group: int | None = None  # number, in its run
    score: float | None = None  # that it got there
    parts: dict[str, float | None] = msgspec.field(default_factory=dict)
    advantage: float | None = None
    model: str | None = None  # whose tokenizer and chat template made the prompts
    episode: Recording


def read_recordings(path: str | Path) -> Iterator[Line]:
    """Raises ConfigError with file, line and key for what is no recording."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}:{number} is no recorded episode: {error}; such files are written with"
                " watch.record_episodes, and by this version of millrace."
            ) from None


def write_recordings(path: str | Path, lines: Iterable[Line]) -> None:
    with Path(path).open("wb") as file:
        file.writelines(encode(line) + b"\n" for line in lines)
