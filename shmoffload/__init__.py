"""shmoffload: out-of-process, multi-tier KV-cache offloading for LLM servers.

Covers: the public names. Does not cover: anything heavy; importing this
package starts nothing and imports neither torch nor vllm.
"""

from __future__ import annotations

__version__ = "0.1.0"
