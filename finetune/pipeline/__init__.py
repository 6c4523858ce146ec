"""The order of the stages, resuming, and the run manifest."""
