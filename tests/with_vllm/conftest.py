"""Tests that need vLLM itself: the model, the server to compare with.

Without vLLM nothing here is collected. (A folder ``tests/vllm`` would be found as an
empty package ``vllm`` when ``tests`` is on the path.)
"""

import importlib.util

import pytest

pytest.register_assert_rewrite("server_kit", "server_traffic")

from server_kit import serve  # noqa: E402  (after they are registered)

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of the tiny model, beside vLLM's own caches."""
    from model import make_model

    return make_model(tmp_path_factory.mktemp("tiny") / "model")


class Reference:
    """What a server without offloading says; each prompt is asked once."""

    def __init__(self, server):
        self._server = server
        self._tokens = {}

    def tokens(self, prompt, *, max_tokens=24):
        """Greedy continuation of a prompt."""
        asked = (tuple(prompt), max_tokens)
        if asked not in self._tokens:
            answer = self._server.complete(prompt, max_tokens=max_tokens)
            self._tokens[asked] = answer.tokens
        return self._tokens[asked]


@pytest.fixture(scope="session")
def reference(model, tmp_path_factory):
    """A server without offloading and without a prefix cache, for the whole run."""
    folder = tmp_path_factory.mktemp("reference")
    options = ["--no-enable-prefix-caching"]
    with serve(model, folder, None, options=options) as server:
        yield Reference(server)
