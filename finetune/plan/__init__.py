"""Bytes, time and money, before any weight is loaded. No torch."""
