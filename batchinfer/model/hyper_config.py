"""Hyper-connections by config.json (mHC, DeepSeek-V4 report section 2.2): several streams between sublayers."""

from dataclasses import dataclass

from batchinfer.model.attention_config import Tensors
from batchinfer.model.config_reader import ConfigReader

_MAX_STREAMS, _MAX_ROUNDS = 64, 1000


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """The number of streams, and how a token's matrix between old and new streams is made doubly stochastic."""

    num_streams: int
    num_rounds: int  # of Sinkhorn: divisions by sums of columns
    eps: float

    @property
    def num_mixed(self) -> int:
        """Values by which a sublayer mixes a token's streams: before it, after it, and past it."""
        return self.num_streams * (2 + self.num_streams)

    def tensors(self, prefix: str, hidden: int) -> Tensors:
        """Yield name and shape of a layer's tensors."""
        for sublayer in ("attn", "ffn"):
            yield f"{prefix}.hc_{sublayer}_fn", (self.num_mixed, self.num_streams * hidden)
            yield f"{prefix}.hc_{sublayer}_base", (self.num_mixed,)
            yield f"{prefix}.hc_{sublayer}_scale", (3,)

    def end_tensors(self, hidden: int) -> Tensors:
        """Yield name and shape of the tensors that join the streams before the output head."""
        yield "model.hc_head_fn", (self.num_streams, self.num_streams * hidden)
        yield "model.hc_head_base", (self.num_streams,)
        yield "model.hc_head_scale", (1,)

    def num_values(self, hidden: int, num_layers: int) -> int:
        """Return the number of values of all these tensors, which are in float32."""
        of_layer = self.num_mixed * (self.num_streams * hidden + 1) + 3
        return 2 * num_layers * of_layer + self.num_streams * (self.num_streams * hidden + 1) + 1


def read_hyper(reader: ConfigReader) -> HyperConnections:
    """Read the keys of hyper-connections.

    Raises:
        ModelError: a key is missing or has an unsupported value.
    """
    return HyperConnections(
        num_streams=reader.size("hc_mult", maximum=_MAX_STREAMS),
        num_rounds=reader.size("hc_sinkhorn_iters", maximum=_MAX_ROUNDS),
        eps=reader.number("hc_eps", at_least=0.0, at_most=1.0),
    )
