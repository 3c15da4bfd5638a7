"""Behind ``tier``: an engine of our own whose GPU is vLLM's primary. No vllm import."""
