"""What a rank is to do, learned while it still imports, and memory made ready for it meanwhile.

A spare rank gets its task when the command has read the job, half a second before the rank's own imports are over.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from batchinfer.host_info import free_memory_bytes, has_gpu, num_cores
from batchinfer.launch.rank_process import RankEnvironment
from batchinfer.model.fresh_memory import FreshMemory

RankTask = tuple[RankEnvironment, FreshMemory | None]


def read_task() -> Future[RankTask]:
    """Read, on a thread, what the starter of this process left, and begin to touch memory for the weights.

    The future raises what RankEnvironment.read raises.
    """
    thread = ThreadPoolExecutor(1, "read task")
    task = thread.submit(_read_task)
    thread.shutdown(wait=False)
    return task


def _read_task() -> RankTask:
    environment = RankEnvironment.read()
    return environment, _memory(environment.weight_bytes)


def _memory(num_bytes: int) -> FreshMemory | None:
    """None where the loader is to ask for it piece by piece, and to say what is wrong if there is not enough."""
    if num_bytes == 0 or num_bytes > free_memory_bytes() or has_gpu():
        return None
    try:
        # the other half of the cores is for imports, and for the loader, which helps when it has to wait
        return FreshMemory(num_bytes, max(1, num_cores() // 2))
    except (OSError, RuntimeError):  # no such address space, or no more threads
        return None
