"""Makes the tiny model that every server test serves.

Covers: weights, configuration and a byte-level tokenizer, the same at every call.
Does not cover: who serves it (``server_kit``).
Who calls it: test fixtures; ``python tests/with_vllm/model.py FOLDER`` by hand.

A Llama of four layers in float32. The weights are larger than a fresh model's, so
that attention is sharp and one changed prompt token changes the whole greedy
continuation: with usual weights wrong KV often gives the same tokens, and "the same
tokens" would prove nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 512
NUM_LAYERS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
MAX_TOKENS = 1024
_HIDDEN = 256
_INNER = 512
_NUM_HEADS = 4
_BOS, _EOS = 256, 257
_SHARP = 2.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "torch_dtype": "float32",
}


def make_model(folder: Path, *, seed: int = 1234) -> Path:
    """Write the model into ``folder`` and return the folder.

    Args:
        folder: made if it is not there.
        seed: another one makes other weights of the same shapes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        _weights(np.random.default_rng(seed)),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write(folder / "config.json", CONFIG)
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "bos_token_id": _BOS, "eos_token_id": _EOS},
    )
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": 4096,
        },
    )
    return folder


def _weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        drawn = rng.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(scale / columns**0.5)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    heads, kv_heads = _NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": ones.copy(),
        "lm_head.weight": normal(VOCAB_SIZE, _HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones.copy(),
            f"{name}.post_attention_layernorm.weight": ones.copy(),
            f"{name}.self_attn.q_proj.weight": normal(heads, _HIDDEN, _SHARP),
            f"{name}.self_attn.k_proj.weight": normal(kv_heads, _HIDDEN, _SHARP),
            f"{name}.self_attn.v_proj.weight": normal(kv_heads, _HIDDEN, _SHARP),
            f"{name}.self_attn.o_proj.weight": normal(_HIDDEN, heads, _SHARP),
            f"{name}.mlp.gate_proj.weight": normal(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": normal(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": normal(_HIDDEN, _INNER),
        }
    return weights


def _tokenizer() -> Tokenizer:
    """One token a byte, two special ones, and names for the rest of the vocabulary."""
    vocabulary = {
        symbol: token
        for token, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocabulary |= {"<s>": _BOS, "</s>": _EOS}
    vocabulary |= {f"<x{token}>": token for token in range(_EOS + 1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    sys.stdout.write(f"{make_model(Path(sys.argv[1]))}\n")
