"""Jobs of a ``ShmTier`` that are not answered, and their answers.

Covers: plain data.
Does not cover: what becomes of them (``jobs``).
Who calls it: ``jobs`` and ``tier``, scheduler thread. Does not import vllm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.types import OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a job.

    Attributes:
        job_id: the job that is answered.
        success: every key is where it should be.
        loaded: of a load, the keys that are in their rows.
        num_bytes: bytes copied.
        time_s: from the job's submission to this answer.
    """

    job_id: int
    success: bool
    loaded: Sequence[OffloadKey] = ()
    num_bytes: int = 0
    time_s: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """A job that is not answered.

    Attributes:
        job_id: vLLM's.
        ctx: the request of the engine that it runs for.
        since_s: when it came.
        num_copying: copies that run for it.
        has_failed: some key will not be where it should be.
        done: keys whose copies have ended.
    """

    job_id: int
    ctx: ReqContext
    since_s: float
    num_copying: int = 0
    has_failed: bool = False
    done: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StoreJob(Job):
    """A store.

    Attributes:
        is_whole: every key that was not known had room.
        is_own_ctx: its request lives as long as it does.
    """

    is_whole: bool = True
    is_own_ctx: bool = False


@dataclass(slots=True, eq=False)
class LoadJob(Job):
    """A load.

    Attributes:
        deadline_s: when what has not arrived fails.
        todo: keys of which no copy runs yet, and their rows.
        promised: keys that were once answered HIT_PENDING.
    """

    deadline_s: float = 0.0
    todo: dict[OffloadKey, int] = field(default_factory=dict)
    promised: set[OffloadKey] = field(default_factory=set)
