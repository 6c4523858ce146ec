"""The command line: thin, one file a command, heavy imports inside the handlers."""
