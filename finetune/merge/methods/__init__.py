"""Methods that merge models: each one a typed pure function of one tensor's values and its settings."""
