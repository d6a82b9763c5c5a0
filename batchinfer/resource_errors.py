"""A refused process or thread, explained as a sentence."""

import resource


def explain_resource_error(error: BaseException) -> str | None:
    """Return the limit of processes and the remedy as a sentence; None for any other error."""
    if not isinstance(error, BlockingIOError) and str(error) != "can't start new thread":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return (
        "no more processes or threads can be started (`ulimit -u` is "
        f"{'unlimited' if limit == resource.RLIM_INFINITY else limit}, a container may have a limit of its own); raise "
        "that limit, and run the same command to go on"
    )
