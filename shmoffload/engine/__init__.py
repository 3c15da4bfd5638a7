"""The scheduler's handle: the core's decisions, and the queues that carry them.

``Engine`` is what an inference server embeds::

    handle.py           calls of the manager, steps, start and close
    traffic.py          everything received and sent for one engine
    tier_link.py        one worker's queue: jobs out, replies in, death proven
    supervisor_link.py  the supervisor: attach, hand-overs, its death
    waiting.py          bounded waits at start and close
    guard.py            nothing of ours raises into a step
    core_settings.py    configuration to the core's arguments
    policies.py         eviction orders by name, plug-ins included
    trace.py            what became of a request's own words, logged
    gauges.py           what the session page shows of the engine
"""

from shmoffload.engine.handle import Engine

__all__ = ["Engine"]
