"""The supervisor: starts, watches, kills and restarts the workers of a session.

Covers: everything between an engine's attach and the death of its last worker.
Does not cover: the data path (engine and workers talk past the supervisor), what a
tier does (``worker``), what an engine does when a supervisor dies (``engine``).
Who calls it: engines through ``spawn``; ``shmoffload serve`` through ``daemon``.

Actors::

    engine ── control channel: Attach [region, page], HandoverAck, KillWorker, Detach
      │  ▲
      │  │ Attached | Refused, WorkerStarted [jobs socket, pidfd], WorkerGone, Detached
      ▼  │
    loop.Supervisor            one thread, one poll: control channels, pidfds of engine
      │                        and workers, listening socket, signals, a turn a second
      ├─ connection.Connection one engine's channel: outbox, what it brought, its end
      └─ keeper.TierKeeper     one per tier: does what its life decides
           ├─ life.WorkerLife  decides; pure: time and events in, actions out
           └─ process.WorkerProcess   one started worker: exec, signals, reaping

Two ways to be started, one loop. *Embedded*: ``spawn.spawn_embedded`` hands over one
end of a socket pair; the loop leaves when that engine is gone. *Daemon*:
``daemon.serve`` also listens on a socket in the runtime directory and waits for the
next engine. ``docs/deaths.md`` says who notices which death and what follows.
"""
