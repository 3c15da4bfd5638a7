"""A real OpenAI server of vLLM with the tiny model, started, asked and ended.

Covers: the command line and environment, waiting until it answers, completions by
token ids, counters, our own status, its processes, the end, what is left.
Does not cover: what should come out (the tests), the model (``model``).
Who calls it: ``tests/with_vllm/test_server_*.py`` and the test of the documents.

A start takes about 25 s of mostly one core, so tests share servers. A server is a
process group of its own: everything it started is found by its session id, ours by
the session's name, and all of it is ended by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

BLOCK_TOKENS = 32
BLOCK_BYTES = 131072  # 4 layers, keys and values, 32 tokens, 2 heads of 64, float32
START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 10.0  # issue 4: nothing of ours is left after that
SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")
_LAST_LINES = 45
_TELLING = re.compile(r"Error: |shmoffload")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a server: offline, its caches in ``cache``."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "VLLM_CONFIG_ROOT": str(cache / "config"),
        "VLLM_CACHE_ROOT": str(cache / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }


def transfer_config(extra: dict) -> dict:
    """Return vLLM's ``--kv-transfer-config`` for an offload configuration."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "ShmOffloadingSpec",
            "spec_module_path": "shmoffload.vllm.spec",
            **extra,
        },
    }


def offload(session: str, tiers: list[dict], *, cpu_bytes=64 << 20, **extra) -> dict:
    """Return our keys of ``kv_connector_extra_config``.

    Args:
        session: names the session, so that a leftover is known as this run's.
        tiers: ``secondary_tiers``.
        cpu_bytes: ``cpu_bytes_to_use``.
        **extra: other keys; ``shmoffload`` is merged with the session's name.
    """
    ours = {"session": session, **extra.pop("shmoffload", {})}
    return {
        "cpu_bytes_to_use": cpu_bytes,
        "secondary_tiers": tiers,
        "shmoffload": ours,
        **extra,
    }


@dataclass(frozen=True)
class Answer:
    """What a completion gave: token ids, and how many prompt tokens were cached."""

    tokens: tuple[int, ...]
    num_cached: int


class Metrics:
    """One reading of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._samples = [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name whose labels include ``labels``; KeyError."""
        found = [
            value
            for other, has, value in self._samples
            if other == name and labels.items() <= has.items()
        ]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)


class Server:
    """One server process tree. Use ``serve``, which also ends it."""

    def __init__(self, process, *, port: int, log: Path, session: str | None) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.session = session

    # Asking.

    def complete(self, prompt, *, max_tokens=24, **more) -> Answer:
        """Complete token ids greedily; any thread. ``more``: keys of the body."""
        answer = self._post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **more,
            },
        )
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Answer(
            tuple(answer["choices"][0]["token_ids"]), details.get("cached_tokens") or 0
        )

    def reset(self, *, external=False) -> None:
        """Empty the GPU's prefix cache, with ``external`` the primary as well.

        Polls: a reset is refused while copies are under way.
        """
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        wait_until(
            lambda: self._post(path, {})["success"],
            timeout_s=SETTLE_TIMEOUT_S,
            what=f"{path} to succeed",
        )

    def metrics(self) -> Metrics:
        with self._open("/metrics") as reply:
            return Metrics(reply.read().decode())

    def status(self) -> dict:
        """``shmoffload status --json`` of this server's session."""
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "shmoffload.cli"),
                *("status", "--json", "--session", self.session),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=SETTLE_TIMEOUT_S,
        )
        assert done.returncode in (0, 1), (done.stderr, self.last_lines())
        return json.loads(done.stdout)

    def tier(self, name: str) -> dict:
        """One tier of ``status``."""
        (found,) = [t for t in self.status()["tiers"] if t["name"] == name]
        return found

    def wait_tier(self, name: str, word: str, expected) -> None:
        """Wait until a tier's word has its value; more than that never comes right."""
        seen = []
        wait_until(
            lambda: seen.append(self.tier(name)[word]) or seen[-1] == expected,
            timeout_s=SETTLE_TIMEOUT_S,
            what=f"{word} of tier {name} to be {expected} (it was {set(seen)})",
        )

    # Looking at processes.

    def processes(self) -> dict[int, str]:
        """Return pid -> title of everything in the server's process session."""
        return {
            pid: title
            for pid, session_id, title in _all_processes()
            if session_id == self.process.pid
        }

    def pids(self, title: str) -> list[int]:
        """Pids of ``EngineCore`` or ``Worker``, as vLLM titles its processes."""
        return sorted(
            pid
            for pid, line in self.processes().items()
            if line.startswith(f"VLLM::{title}")
        )

    def ours(self) -> dict[int, str]:
        """Return pid -> command line of this session's supervisor and workers."""
        return _of_session(self.session) if self.session else {}

    def names(self) -> list[str]:
        """Names of the session in /dev/shm."""
        if not self.session:
            return []
        return sorted(
            name
            for name in os.listdir(leaks.SHM_DIR)
            if name.startswith(f"shmoffload.{self.session}.")
        )

    def last_lines(self) -> str:
        """The end of the log, after the errors and our own lines before it."""
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines[:-_LAST_LINES] if _TELLING.search(line)]
        shown = [*telling[-_LAST_LINES // 3 :], "...", *lines[-_LAST_LINES:]]
        return "\n".join([f"of {self.log}:", *shown])

    # Ending.

    def kill(self, *pids: int, sig=signal.SIGKILL) -> None:
        """Signal processes of this server, by pid."""
        known = {self.process.pid, *self.processes(), *self.ours()}
        for pid in pids:
            assert pid in known, f"{pid} is no process of this server"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def wait_ended(self, *, timeout_s=GONE_TIMEOUT_S) -> None:
        """Wait until no process of the server and nothing of ours is left."""

        def left():
            self.process.poll()  # reaps it
            return [self.processes(), self.ours(), self.names()]

        try:
            wait_until(
                lambda: not any(left()),
                timeout_s=timeout_s,
                what="the end of the server's processes and of our names",
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {left()}\n{self.last_lines()}") from None

    def stop(self) -> None:
        """SIGTERM to the API server, as an operator does, and wait for the end."""
        self.process.terminate()
        self.wait_ended()

    def clear(self) -> None:
        """End whatever is left, by pid; for a ``finally``."""
        for _ in range(3):  # what is killed may just have started another
            for pid in [*self.processes(), *self.ours()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(timeout=GONE_TIMEOUT_S)
        wait_until(
            lambda: not [*self.processes(), *self.ours()],
            timeout_s=GONE_TIMEOUT_S,
            what="the end of what was killed",
        )
        for name in self.names():
            (leaks.SHM_DIR / name).unlink(missing_ok=True)

    def _post(self, path: str, body: dict) -> dict:
        with self._open(path, json.dumps(body).encode()) as reply:
            return json.loads(reply.read())

    def _open(self, path: str, body: bytes | None = None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            body,
            {"content-type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise AssertionError(
                f"{path}: {error.code} {text}\n{self.last_lines()}"
            ) from None
        except OSError as error:
            raise AssertionError(f"{path}: {error}\n{self.last_lines()}") from None

    def is_ready(self) -> bool:
        """Whether it answers /health; fails at once when the process has ended."""
        code = self.process.poll()
        assert code is None, f"the server ended with {code}\n{self.last_lines()}"
        url = f"http://127.0.0.1:{self.port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as ok:
            return ok.status == 200
        return False


def start(model: Path, folder: Path, extra: dict | None, *, options=(), env=None):
    """Start a server and return it without waiting.

    Args:
        model: folder of the model.
        folder: for its log.
        extra: ``kv_connector_extra_config``, see ``offload``; None: no offloading.
        options: more of the command line, later ones win.
        env: more of the environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", "67108864"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        "--disable-uvicorn-access-log",
    ]
    if extra is not None:
        command += ["--kv-transfer-config", json.dumps(transfer_config(extra))]
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment(model.parent), **(env or {})},
            cwd=folder,
            start_new_session=True,
        )
    session = extra["shmoffload"]["session"] if extra else None
    return Server(process, port=port, log=log, session=session)


@contextlib.contextmanager
def serve(model: Path, folder: Path, extra: dict | None, *, options=(), env=None):
    """Yield a server that answers; ends it by SIGTERM and checks what is left.

    Arguments as ``start``. A server that the body has ended is only checked.
    """
    server = start(model, folder, extra, options=options, env=env)
    try:
        wait_until(
            server.is_ready, timeout_s=START_TIMEOUT_S, what="the server to answer"
        )
        yield server
        server.stop()
    finally:
        server.clear()


def _of_session(session: str) -> dict[int, str]:
    return {
        pid: line
        for pid, _, line in _all_processes()
        if pid != os.getpid()
        and session in re.split(r"[ \0]", line)
        and any(word in line for word in ("shmoffload:", "-m shmoffload"))
        and "shmoffload.cli" not in line  # our own look at its status
    }


def _all_processes():
    """Yield (pid, session id, command line) of every living process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2]
                state, _, _, session_id = stat.split()[:4]
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                if state != "Z":
                    text = line.replace(b"\0", b" ").decode(errors="replace").strip()
                    yield int(entry), int(session_id), text
