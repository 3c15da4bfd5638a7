"""Bytes of a block for models that people name.

Covers: a few published geometries, sizes given as bytes.
Does not cover: other models (``--model 64MiB`` says the bytes of a block).
Who calls it: plan mode and ``stats``; pure.

Per token, from the models' public ``config.json``: layers x KV heads x head size x
2 (K and V) x 2 bytes (bf16); DeepSeek-V3 keeps one latent of 512 + 64 values a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shmoffload.errors import ConfigError
from shmoffload.wire.config import closest
from shmoffload.wire.sizes import parse_size

TOKEN_BYTES: Final = {
    "llama-3.1-8b": 32 * 8 * 128 * 2 * 2,
    "llama-3.1-70b": 80 * 8 * 128 * 2 * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
}
DEFAULT_MODEL: Final = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class BlockModel:
    """How large a block is.

    Attributes:
        name: of the model, or the size as it was given.
        block_bytes: KV bytes of a block.
    """

    name: str
    block_bytes: int


def model_of(text: str, *, block_tokens: int) -> BlockModel:
    """Read a model's name, or the bytes of a block like ``64MiB``.

    Raises:
        ConfigError: neither.
    """
    name = text.strip().lower()
    if name in TOKEN_BYTES:
        return BlockModel(name, TOKEN_BYTES[name] * block_tokens)
    try:
        block_bytes = parse_size(name)
    except ConfigError as error:
        near = closest(name, tuple(TOKEN_BYTES), "did you mean {}?", "known are {}")
        raise ConfigError(
            f'--model "{text}": {near}; or write the bytes of a block like 64MiB'
        ) from error
    if block_bytes < 1:
        raise ConfigError(f'--model "{text}": a block has at least 1 byte')
    return BlockModel(text.strip(), block_bytes)


def named_models(block_tokens: int) -> list[BlockModel]:
    """Return every model that has a name."""
    return [model_of(name, block_tokens=block_tokens) for name in TOKEN_BYTES]
