"""One result type per command: what its function returns, what `--json` writes, what `report` and `compare` read."""
