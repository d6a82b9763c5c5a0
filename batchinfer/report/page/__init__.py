"""The HTML page of finished runs: one file without scripts and external resources."""
