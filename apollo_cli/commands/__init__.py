"""One thin file per command; ``apollo_cli.cli`` imports each only when it is called."""
