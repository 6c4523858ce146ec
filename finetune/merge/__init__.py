"""Merging adapters and models: pure tensor functions and planned execution."""
