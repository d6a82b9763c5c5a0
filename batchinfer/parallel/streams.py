"""A second GPU stream, on which rows travel while the first one computes.

    computing   … pack rows | ready | other work …            | waits for arrived | use what came
    travelling              | waits for ready | send, receive | arrived

Only the GPU waits; the host goes on. Torch's cache of GPU memory has to know of every stream that uses a tensor, or
it would hand its memory out while the other stream still works on it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class TravelStream:
    """The stream, and the two places at which it and the computation meet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def depart(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """On the computing thread: the event after which these tensors are there to be sent."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def travelling(self, ready: torch.cuda.Event) -> Iterator[None]:
        """On the sending thread: what the block starts runs on this stream, after `ready`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield

    def arrived(self) -> torch.cuda.Event:
        """Return the event after which the received rows are complete; call it on the sending thread."""
        return self._stream.record_event()

    def arrive(self, tensors: Sequence[torch.Tensor], arrived: torch.cuda.Event) -> None:
        """On the computing thread: what it starts from now on runs after `arrived` and may use these tensors."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        for tensor in tensors:
            tensor.record_stream(computing)
