"""Fenced blocks of Markdown, in which models like to wrap code and JSON."""

import re

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)


def last_block(text: str, *, tags: tuple[str, ...]) -> str | None:
    """The last block with one of these tags, or else the last without any; None if there is
    none."""
    blocks = [(found["tag"].lower(), found["body"]) for found in _BLOCK.finditer(text)]
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    return tagged[-1] if tagged else untagged[-1] if untagged else None
