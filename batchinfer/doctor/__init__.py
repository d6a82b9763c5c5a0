"""The report of `batchinfer doctor`: the machine's abilities and speeds."""
