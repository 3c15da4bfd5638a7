"""Which weights a model has, told from its files, without its path.

Covers: local directories and files, the Hugging Face cache, revisions in it.
Does not cover: what else changes bytes (``namespace``); downloading.
Who calls it: ``namespace``, at start; reads at most ``SAMPLES + 2`` windows of each
weight file, which has just been loaded (measured: 100 files, in memory, 0.04 s).

Content decides, so that the same model has the same identity under another path, on
another node, and by name as by directory, and that new weights under an old path have
another one. Weight files are sampled, not read: an edit that leaves size, head, tail
and every sampled window as they were is not seen. ``shmoffload.revision`` is for that.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Final

import xxhash

from shmoffload.errors import ConfigError

WINDOW_BYTES: Final = 4096
SAMPLES: Final = 64
MAX_TEXT_BYTES: Final = 64 << 20

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TEXTS: Final = frozenset(
    {"config.json", "params.json", "hf_quant_config.json", "quantize_config.json"}
)
"""Files that change what weights compute; so do ``*.py``, a model's own code."""
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HUB_NAME: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def model_identity(
    name: str, revision: str = "", *, hub_cache: Path | None = None
) -> tuple[str, list[str]]:
    """Return the identity of the model that vLLM calls ``name``, and notes.

    Args:
        name: a directory, a weight file, or a name on the Hugging Face hub.
        revision: what the operator calls it; picks one of several in the hub's cache.
        hub_cache: directory of that cache; where Hugging Face has it by default.

    Raises:
        ConfigError: the cache has several revisions, and none is named.
    """
    path = Path(name)
    if path.is_dir():
        return _identity_of_directory(path, revision)
    if path.is_file():
        return f"file:{_sample(path)}", []
    if _HUB_NAME.fullmatch(name):
        found = _identity_in_hub(
            name, revision, hub_cache if hub_cache is not None else _hub_cache()
        )
        if found is not None:
            return found, []
    if revision:
        return f"name:{name}", []
    return f"name:{name}", [
        f"the files of model {name} were not found: its blocks are known by that name "
        f"only; set shmoffload.revision, and change it when the weights change"
    ]


def _identity_of_directory(path: Path, revision: str) -> tuple[str, list[str]]:
    identity, num_weights = _digest(path)
    if num_weights:
        return identity, []
    if revision:  # then the path may be a temporary one
        return f"{identity}:no-weights", []
    return f"{identity}:{path.resolve()}", [
        f"no weight files were found in {path}: its blocks are known by that path "
        f"only; set shmoffload.revision, and change it when the weights change"
    ]


def _digest(directory: Path) -> tuple[str, int]:
    """Return a digest of what lies in a model's directory, and how many weights."""
    state = xxhash.xxh3_128()
    num_weights = 0
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        is_weights = entry.suffix in _WEIGHTS
        if not (is_weights or entry.name in _TEXTS or entry.suffix == ".py"):
            continue
        if not entry.is_file():
            continue
        num_weights += is_weights
        content = _blob_name(entry) if is_weights else None
        if content is None:
            content = _sample(entry) if is_weights else _whole(entry)
        state.update(f"{entry.name}\0{content}\0".encode())
    return f"files:{state.hexdigest()}", num_weights


def _blob_name(path: Path) -> str | None:
    """Return the hash by which the hub's cache names a file, if it does."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and _BLOB.fullmatch(target.name)
    return target.name if is_blob else None


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return xxhash.xxh3_128_hexdigest(file.read(MAX_TEXT_BYTES))


def _sample(path: Path) -> str:
    """Return size and a digest of windows: head, tail, and evenly between."""
    state = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        last = max(0, size - WINDOW_BYTES)
        offsets = {last * idx // (SAMPLES + 1) for idx in range(SAMPLES + 2)}
        for offset in sorted(offsets):
            state.update(os.pread(fd, WINDOW_BYTES, offset))
    finally:
        os.close(fd)
    return f"{size}-{state.hexdigest()}"


def _hub_cache() -> Path:
    """Return where Hugging Face's library keeps what it has downloaded."""
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        home = os.environ.get("HF_HOME") or os.path.join("~", ".cache", "huggingface")
        cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
        return Path(cache).expanduser()
    return Path(constants.HF_HUB_CACHE)


def _identity_in_hub(name: str, revision: str, hub_cache: Path) -> str | None:
    """Return the identity of a hub model that is in the cache, else None."""
    repo = hub_cache / f"models--{name.replace('/', '--')}"
    snapshots = repo / "snapshots"
    if not snapshots.is_dir():
        return None
    identities = {}
    for snapshot in sorted(snapshots.iterdir()):
        identity, num_weights = _digest(snapshot)
        if num_weights:  # a tokenizer alone may have been fetched for another revision
            identities[snapshot.name] = identity
    commit = _commit(repo, revision) if revision else None
    if commit in identities:
        return identities[commit]
    if len(set(identities.values())) > 1:
        commits = ", ".join(sorted(commit[:12] for commit in identities))
        asked = (
            f'"{revision}" is none of them' if revision else "vLLM does not say which"
        )
        raise ConfigError(
            f"the cache {repo} has {len(identities)} revisions of {name} with "
            f"different files, and {asked}: set shmoffload.revision to the one that is "
            f"served ({commits}, or a branch such as main)"
        )
    return next(iter(identities.values()), None)


def _commit(repo: Path, revision: str) -> str | None:
    """Return the commit that a branch, a tag or the beginning of a commit means."""
    ref = repo / "refs" / revision
    if (
        not os.path.isabs(revision)
        and ".." not in Path(revision).parts
        and ref.is_file()
    ):
        return ref.read_text().strip()
    if not re.fullmatch(r"[0-9a-f]{7,40}", revision):
        return None
    matching = [
        commit
        for commit in os.listdir(repo / "snapshots")
        if commit.startswith(revision)
    ]
    return matching[0] if len(matching) == 1 else None
