"""From a dataset spec to a dataset build: read, normalise, validate, split, tokenise, account. No torch."""
