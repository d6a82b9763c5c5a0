"""One command on one run folder: whether it is the same job, what it may do there, and what it tells about itself."""
