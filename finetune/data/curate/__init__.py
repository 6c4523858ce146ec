"""Curation as pure functions: texts or rows in, decisions with reasons out; nothing here reads or writes a build."""
