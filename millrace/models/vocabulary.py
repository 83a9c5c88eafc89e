"""What tells two tokenizers apart where only one of them is at hand."""

import hashlib
import json
from typing import Any


def vocabulary_checksum(tokenizer: Any) -> str:
    """The same for tokenizers whose ids mean the same, and for no others."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[::-1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
