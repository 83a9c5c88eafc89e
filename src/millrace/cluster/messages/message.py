"""The base classes of all messages."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Part(Message, frozen=True):
    """Base of messages about a call before its reply."""
