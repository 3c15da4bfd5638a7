"""What vLLM is told: figures for /metrics, residency events."""
