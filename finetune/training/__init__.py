"""One visible assembly per training method."""
