"""Tasks of the lm-evaluation-harness as suites: their documents, prompts and scoring; answers from our own models."""
