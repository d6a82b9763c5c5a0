"""Where a run folder is kept: documents on a file system, or in an object store with a copy on each node."""
