"""What token ids mean, as a short name: what was learned in one vocabulary is of no use in another."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all tokens and their ids: the same for tokenizers whose ids mean the same, whatever else differs."""
    told = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()
