"""Rows made of a model's answers: what was answered, what passed, and which answers are kept."""
