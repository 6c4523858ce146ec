"""Reading answers by hand: a blinded local page, and what the reading says about the scorer."""
