"""Which vLLM this is, and whether its set-up is one that we can serve.

Covers: the tested range, the log's handlers, nodes, names that changed.
Does not cover: calls that one release has and another has not (their implementers
look for the feature).
Who calls it: ``spec`` at start, in the scheduler and in the GPU workers; ``manager``
for names. Importing it imports vllm.
"""

from __future__ import annotations

import logging
import platform
import re
from typing import TYPE_CHECKING, Any, Final

import vllm

from shmoffload.errors import BadInputError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadPolicy
    from vllm.v1.kv_offload.config import OffloadingConfig

log = logging.getLogger(__name__)

OLDEST_TESTED: Final = (0, 32)
NEWEST_TESTED: Final = (0, 33)
_OUR_LOGGER: Final = "shmoffload"
_ONE_NODE_BACKENDS: Final = ("mp", "uni")

_warned: set[str] = set()


def release_of(version: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version such as ``"0.32.0+cpu"``, else None."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def warn_if_untested(version: str | None = None) -> None:
    """Say once if this vLLM is outside the range that our tests run on."""
    version = vllm.__version__ if version is None else version
    release = release_of(version)
    is_tested = release is not None and OLDEST_TESTED <= release <= NEWEST_TESTED
    if is_tested or version in _warned:
        return
    _warned.add(version)
    log.warning(
        "vLLM %s is outside the range that shmoffload is tested with (%s to %s): if "
        "anything looks wrong, take a vLLM of that range",
        version,
        *(".".join(map(str, release)) for release in (OLDEST_TESTED, NEWEST_TESTED)),
    )


def engine_text() -> str:
    """Name what lays out the bytes of a block, such as ``"0.32 cpu x86_64 amx"``.

    vLLM may change the order of a page's bytes with a release (a patch release keeps
    it), and its CPU kernels take another where the processor has AMX.
    """
    from vllm.platforms import current_platform

    release = release_of(vllm.__version__)
    number = ".".join(map(str, release)) if release else vllm.__version__
    # ROCm says "cuda" as its device as well.
    words = [number, current_platform.device_name or current_platform.device_type]
    if current_platform.device_type == "cpu":
        words += [platform.machine(), "amx" if _has_amx() else "vec"]
    return " ".join(words)


def _has_amx() -> bool:
    """Say whether torch may use AMX tiles here, which is what vLLM goes by."""
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(has_amx is not None and has_amx())


def share_log_handlers() -> None:
    """Let our lines go where vLLM's go, unless somebody has set up our logger."""
    ours, theirs = logging.getLogger(_OUR_LOGGER), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False  # as vLLM's own: a root handler would say it all twice


def offload_policy(*, is_request_level: bool) -> OffloadPolicy:
    """Return vLLM's word for a policy; 0.30 renamed BLOCK_LEVEL to CHUNK_LEVEL."""
    from vllm.v1.kv_offload.base import OffloadPolicy

    if is_request_level:
        return OffloadPolicy.REQUEST_LEVEL
    name = "CHUNK_LEVEL" if hasattr(OffloadPolicy, "CHUNK_LEVEL") else "BLOCK_LEVEL"
    return getattr(OffloadPolicy, name)


def refuse_several_nodes(num_ranks: int) -> None:
    """Refuse GPU workers that do not share this node's memory.

    A worker on another node would make a region of its own there: its part of each
    block would never reach a tier, and what came back would be garbage. vLLM's
    ``OffloadingConfig`` says nothing of nodes, so this asks vLLM's configuration and,
    where workers may be anywhere (Ray), the workers themselves.

    Call it in each GPU worker while its KV caches are registered: then vLLM's
    configuration is at hand, and all workers are here, for the question is asked of
    all of them together.

    Raises:
        BadInputError: they are on several nodes.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if num_ranks == 1 or config is None:
        return
    num_nodes = getattr(config.parallel_config, "nnodes_within_dp", 1)
    backend = config.parallel_config.distributed_executor_backend
    if num_nodes == 1 and (backend in _ONE_NODE_BACKENDS or _is_one_node()):
        return
    raise BadInputError(
        f"the {num_ranks} GPU workers of this engine are on several nodes, and a "
        f"primary region is the memory of one: keep tensor and pipeline parallel "
        f"within a node, and use replicas (--data-parallel-size) across nodes"
    )


def refuse_partial_windows(config: OffloadingConfig) -> None:
    """Refuse blocks that vLLM 0.32 would store without their first GPU blocks.

    ``setup`` does so where there are several groups. A model whose one group has a
    window looks like any other there; vLLM's configuration tells, in a GPU worker.

    Raises:
        BadInputError: such a model, more than one GPU block per block, and no sign
            of a release that has mended it.
    """
    from vllm.config import get_current_vllm_config_or_none

    per_chunk, (group, *_) = config.cache.blocks_per_chunk, config.groups
    current = get_current_vllm_config_or_none()
    if per_chunk == 1 or current is None:
        return
    if hasattr(group, "sliding_window_size_in_chunks"):  # since 0.33, mended there
        return
    model, scheduler = current.model_config, current.scheduler_config
    has_window = bool(model.get_sliding_window()) and not model.disable_sliding_window
    if has_window and not scheduler.disable_hybrid_kv_cache_manager:
        raise BadInputError(
            f"blocks_per_chunk = {per_chunk} with a sliding window: this vLLM stores "
            f"blocks of it with parts missing, so that wrong bytes would be loaded: "
            f"give blocks_per_chunk = 1 (or block_size = a GPU block), or take vLLM "
            f"0.33"
        )


def refuse_uneven_stages(config: OffloadingConfig, part_bytes: int) -> None:
    """Refuse pipeline stages whose parts of a block differ in size.

    Each rank makes the geometry of the region from its own part. A collective call
    where there are stages: call it in every GPU worker of the engine.

    Raises:
        BadInputError: they differ.
    """
    num_stages = config.parallel.pp_size
    if num_stages == 1:
        return
    import torch

    group = _all_ranks()
    parts: list[int] = [0] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, part_bytes, group=group)
    if len(set(parts)) > 1:
        raise BadInputError(
            f"the {num_stages} pipeline stages have blocks of {min(parts)} to "
            f"{max(parts)} bytes, and a slot has equal parts for all: take a "
            f"--pipeline-parallel-size that divides the layers, or tensor parallel"
        )


def _is_one_node() -> bool:
    """Ask all ranks of this engine whether they share memory; a collective call."""
    from vllm.distributed import parallel_state

    return all(parallel_state.in_the_same_node_as(_all_ranks(), source_rank=0))


def _all_ranks() -> Any:  # noqa: ANN401  (a ProcessGroup; torch is not imported here)
    """Return the group of this engine's ranks that talks without a GPU."""
    from vllm.distributed import parallel_state

    try:
        return parallel_state.get_inner_dp_world_group().cpu_group
    except AssertionError:  # vLLM makes it only where replicas share a world
        return parallel_state.get_world_group().cpu_group
