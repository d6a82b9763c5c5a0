"""Columns of every Parquet table in a run folder, with their meanings: the contract of `schema --stats`."""
