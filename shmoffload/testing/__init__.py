"""The shipped test kit: polling, leak checks, the conformance suite of tiers."""
