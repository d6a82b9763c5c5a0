"""Start of the ranks, and their reports on themselves."""

from pathlib import Path
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.controller.experts.history import ExpertHistory
from batchinfer.controller.units import kv_tokens
from batchinfer.equal_rows import UNEQUAL, EqualRows, combine
from batchinfer.launch.rank_loader import RankLoader, join_message
from batchinfer.progress import note
from batchinfer.protocol.messages import Start
from batchinfer.run.session import Session
from batchinfer.run.trace import Tracer
from batchinfer.run.units.claims import UnitClaims
from batchinfer.run.units.reused import REUSED
from batchinfer.run.weights_digest import cache_folder, whole_weights_digest
from batchinfer.rundir import RunDir, read_state
from batchinfer.whole_files import remove_folder


class RankStart:
    """Starter of a run's ranks; called again after each failure.

    Args:
        rows: all units, rows of plan/units, since done units may be opened again.
    """

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        session: Session,
        tracer: Tracer,
        ranks: RankLoader,
        rows: list[dict[str, Any]],
        experts: ExpertHistory,
        claims: UnitClaims,
    ) -> None:
        self._job, self._session, self._tracer, self._ranks = job, session, tracer, ranks
        self._experts, self._claims = experts, claims
        self._transfers = run.kv_transfers(session.name)
        self._reported: set[str | None] = set()
        state = read_state(run)
        self._reused: dict[str, Any] | None = state.get(REUSED)
        if self._reused is not None:
            claims.accepts_reused = None
        fingerprint = state["fingerprint"]
        digests = {name: fingerprint[name] for name in ("model.weights", "model.config")}
        if job.kv.dir is not None:
            digests["model.weights"] = whole_weights_digest(Path(job.model.path), cache_folder())
        most_tokens, largest_tokens = kv_tokens(rows)
        self._start = Start(
            job=job.model_dump_json(),
            most_tokens=most_tokens,
            largest_tokens=largest_tokens,
            transfer_folder=str(self._transfers),
            traced=tracer.enabled,
            model_digests=digests,
            run_id=state.get("id", ""),
        )

    def __call__(self) -> None:
        """Start the ranks.

        Raises:
            RanksDiedError, BatchinferError, InterruptedRunError: see RankLoader.load.
        """
        remove_folder(self._transfers)
        group = self._ranks.group
        with self._tracer.span("load", "controller"):
            slots = {str(place.role): self._experts.slots(place.role) for place in group.places}
            most, largest = self._start.most_tokens, self._start.largest_tokens
            ready = self._ranks.load(join_message(self._job, slots, most_tokens=most, largest_tokens=largest))
            group.send_to_all(self._start)
        self._tracer.add("start and load", "ranks", self._ranks.started_s, self._ranks.loaded_s)
        hosts = group.connections.hosts
        self._experts.ranks_loaded(
            {role: [hosts[rank] for rank in ranks] for role, ranks in group.ranks_of_role.items()}
        )
        self._session.device = ready[0].device
        if self._job.kv.dtype == "fp8" and ready[0].device == "cpu" and "fp8 on a CPU" not in self._reported:
            self._reported.add("fp8 on a CPU")
            note("KV is in FP8: on a CPU each step widens it, and attention is not fused with what is around it")
        self._note_equal_rows([message.equal_rows for message in ready])
        self._decide_on_reused()
        for reason in sorted({message.no_cpp for message in ready if message.no_cpp} - self._reported):
            self._reported.add(reason)
            note(
                f"warning: the model runs in plain PyTorch, slower than the C++ operations, which cannot run: {reason}"
            )
        for reason in sorted({message.no_drafts for message in ready if message.no_drafts} - self._reported):
            self._reported.add(reason)
            note(f"no tokens are drafted with the model's MTP layer: {reason}")
        said = {sentence for message in ready for sentence in (message.graphs, message.sharing) if sentence}
        for sentence in sorted(said - self._reported):
            self._reported.add(sentence)
            note(sentence)

    def _note_equal_rows(self, reports: list[EqualRows]) -> None:
        """Combine the ranks' checks of equal rows with those before a restart, and warn of a difference."""
        earlier = [] if self._session.equal_rows is None else [self._session.equal_rows]
        found = self._session.equal_rows = combine([*earlier, *reports])
        if found.bit_equal is False and found.bit_equal_reason not in self._reported:
            self._reported.add(found.bit_equal_reason)
            note(f"warning: {UNEQUAL}: {found.bit_equal_reason}")

    def _decide_on_reused(self) -> None:
        """Accept answers of an earlier run if its processor rounds as these ranks do; otherwise warn once."""
        if self._reused is None or self._session.equal_rows is None:
            return
        here = self._session.equal_rows.numerics
        self._claims.accepts_reused = here == self._reused["numerics"]
        if not self._claims.accepts_reused and REUSED not in self._reported:
            self._reported.add(REUSED)
            note(
                f"warning: answers of {self._reused['run']} are not reused, and their rows are computed again: they "
                f"were computed with {self._reused['numerics']}, which may round differently from {here} here"
            )
