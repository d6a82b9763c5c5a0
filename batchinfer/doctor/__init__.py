"""What this machine can run, and how fast: `batchinfer doctor`."""
