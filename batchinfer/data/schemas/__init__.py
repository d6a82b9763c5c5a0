"""The columns of every Parquet table in a run folder, with what they mean: the contract of `schema --stats`."""
