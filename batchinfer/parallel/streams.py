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
    """The second stream, with the events by which it and the computing stream wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def depart(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Return the event after which these tensors can be sent; call it on the computing thread."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def travelling(self, ready: torch.cuda.Event) -> Iterator[None]:
        """Run the block's work on this stream, after `ready`; for the sending thread."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield

    def arrived(self) -> torch.cuda.Event:
        """Return the event after which the received rows are complete; call it on the sending thread."""
        return self._stream.record_event()

    def arrive(self, tensors: Sequence[torch.Tensor], arrived: torch.cuda.Event) -> None:
        """Have the computing thread's stream wait for `arrived`, so that later work may use these tensors."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        for tensor in tensors:
            tensor.record_stream(computing)
