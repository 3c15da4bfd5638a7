"""vLLM's configuration to ours: keys, tiers, what changes bytes. No vllm import."""
