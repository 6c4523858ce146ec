"""Small independent checks over a recipe and what it names; each reports, none repairs, and all faults come at once."""
