"""Passing what a large model knows to a small one: teacher caches, distillation losses, and the ways to train with them."""
