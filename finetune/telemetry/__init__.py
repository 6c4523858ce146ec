"""Callbacks that write typed events and never change training."""
