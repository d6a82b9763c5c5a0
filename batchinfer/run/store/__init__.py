"""Documents of a run: files of a shared folder, or objects of a bucket with a copy on each node."""
