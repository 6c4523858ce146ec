"""Merging whole models: planned from headers, streamed in chunks, resumable, and proven from disk."""
