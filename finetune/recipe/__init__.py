"""Recipes: the frozen schema, loading with line numbers, resolving, explaining, comparing."""
