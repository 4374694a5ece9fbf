"""The checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import QuadsError


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer; QuadsError when it has none, or no EOS token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as e:
        raise QuadsError(
            f"no usable tokenizer: {str(e).splitlines()[0]}", where=str(path), do="add tokenizer.json"
        ) from e
    if not tokenizer.encode("a1"):
        raise QuadsError("the tokenizer knows no text", where=str(path), do="add the model's tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise QuadsError("the tokenizer has no EOS token", where=str(path), do="set eos_token in tokenizer_config.json")
    return tokenizer
