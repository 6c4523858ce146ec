"""Tokenizers, weights, quantization, adapters and attention."""
