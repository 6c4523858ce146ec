"""The stages of a dataset build: read → table → curate → sides → guard → choose → write; each stops and resumes."""
