"""Secrets by the name of an environment variable: `Authorization = "Bearer env:JUDGE_KEY"`.

Promise: settings hold names only, and so do config dumps, logs and run directories. Messages about
a service, and its own messages, are shown without the values. Processes that call no service, such
as engines and trainers, have no variable whose name says that it is a secret.
"""

import os
import re
from collections.abc import Mapping

from millrace.core.errors import ConfigError

VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
SECRET_NAME = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)", re.IGNORECASE)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # models may have to be downloaded
SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")


class Secrets:
    """The values of the variables that a table of settings names."""

    def __init__(self, settings: Mapping[str, str], *, owner: str) -> None:
        """Raises ConfigError for a variable that is not set. `owner`: such as "Scorer 'judge'"."""
        self._values: dict[str, str] = {}
        for name in (name for text in settings.values() for name in VARIABLE.findall(text)):
            value = os.environ.get(name, "").strip()  # without a trailing newline
            if not value:
                raise ConfigError(
                    f"{owner} needs the environment variable {name!r}, which is not set;"
                    " set it before the run starts."
                )
            self._values[name] = value

    def filled(self, text: str) -> str:
        return VARIABLE.sub(lambda found: self._values[found[1]], text)

    def hidden(self, text: str) -> str:
        """Replace the values by the names of their variables."""
        for name, value in self._values.items():
            text = text.replace(value, f"<{name}>")
        return text


def is_secret(variable: str) -> bool:
    """Whether the name of an environment variable says that it is a secret, such as *_KEY."""
    return SECRET_NAME.fullmatch(variable) is not None and variable not in HUB_TOKENS


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_secret(name)}


def check_headers(headers: Mapping[str, str], *, owner: str) -> None:
    for name, value in headers.items():
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{owner} has a header {name!r} that is not text.")
        if name.lower() in SECRET_HEADERS and not VARIABLE.search(value):
            raise ConfigError(
                f"{owner} has its {name!r} header in the settings, which the run saves; put the"
                " value into an environment variable and write 'env:NAME'."
            )
