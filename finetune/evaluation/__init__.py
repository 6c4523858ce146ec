"""Generate, score and compare; knows nothing of training."""
