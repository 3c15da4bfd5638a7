"""Replays recorded or generated requests against a live engine, byte for byte."""
