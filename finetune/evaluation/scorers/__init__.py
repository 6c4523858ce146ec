"""Scorers: pure functions from an answer and its reference to a number, found by name in `registry`."""
