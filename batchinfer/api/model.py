"""`Model`: ranks that stay loaded between calls of `generate`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from batchinfer.api.answers import Answers
from batchinfer.api.display import Progress, is_terminal
from batchinfer.api.generation import answer
from batchinfer.api.job_keys import ModelKeys
from batchinfer.api.process import CommandProcess, OwnProcess
from batchinfer.api.settings import CallSettings, ModelSettings, instead_of, parts_of, with_keys_of, working_folder
from batchinfer.config import JobConfig, did_you_mean, job_of_table
from batchinfer.model.config import load_model_config
from batchinfer.records import ConfigError

FIXED = ("model", "dtype", "cluster", "kv")  # settings of a Model, not of a call
_ANY_CALL = {"input": {"files": ["-"], "prompt": "-"}, "output": {"dir": "-"}, "sampling": {"max_tokens": 1}}


class Model:
    """A model folder for several calls of `generate`; ranks load in the first call and stay for the next.

    >>> with batchinfer.Model("sample_data/model", dtype="float32") as model:
    ...     greedy = model.generate(["The ferry", "The baker"], max_tokens=3)
    ...     warm = model.generate(["The ferry"], max_tokens=5, temperature=1.0, n=2)
    >>> greedy.num_rows, warm.num_rows
    (2, 2)

    One call computes at a time; a call from another thread waits. Lost ranks are loaded again. The ranks end with
    `close`, with the `with` statement, or with the process that made the Model, however this process ends.

    Args:
        path: the model folder, or a dict of the keys of [model].
        settings: dtype, and the keys of [cluster] and [kv] as dicts: cluster={"prefill_ranks": 2}.

    Raises:
        ConfigError: a setting is wrong, or is a setting of a call.
        ModelError: the model folder does not exist or cannot be used.
    """

    @with_keys_of(ModelSettings)
    def __init__(self, path: str | Path | ModelKeys, **settings: Unpack[ModelSettings]) -> None:
        for key in settings:
            if key not in FIXED:
                raise ConfigError(f"{key} is no setting of a Model; {_instead_of(key)}")
        parts = parts_of({"model": path}), parts_of(settings)
        self._parts = {key: {**parts[0].get(key, {}), **parts[1].get(key, {})} for key in ("model", "cluster", "kv")}
        job = job_of_table(self._parts | _ANY_CALL, Path("Model()"), working_folder())
        self._parts["model"]["path"] = job.model.path  # absolute, because the working folder may change
        load_model_config(Path(job.model.path))
        self._maker = os.getpid()
        self._process: OwnProcess | None = None
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread of the present call
        self._is_closed = False

    @overload
    def generate(self, data: Any, *, stream: Literal[False] = False, **settings: Unpack[CallSettings]) -> Answers: ...

    @overload
    def generate(
        self, data: Any, *, stream: Literal[True], **settings: Unpack[CallSettings]
    ) -> Iterator[dict[str, Any]]: ...

    @overload
    def generate(
        self, data: Any, *, stream: bool, **settings: Unpack[CallSettings]
    ) -> Answers | Iterator[dict[str, Any]]: ...

    @with_keys_of(CallSettings)
    def generate(
        self,
        data: Any,
        *,
        user: str | None = None,
        messages: str | None = None,
        prompt: str | None = None,
        token_ids: str | None = None,
        raw: bool = False,
        stream: bool = False,
        progress: Progress = True,
        **settings: Any,
    ) -> Answers | Iterator[dict[str, Any]]:
        """Answer prompts as `batchinfer.generate`, with the same arguments except for those of the model.

        The Model stays usable after a call that fails or is interrupted.

        Raises:
            ConfigError: in addition to `batchinfer.generate`: the Model is closed, belongs to another process, or this
                thread has an open iterator.
        """
        fixed = [key for key in settings if key in FIXED]
        if fixed:
            raise ConfigError(
                f"{fixed[0]} is a setting of the Model; give it when the Model is made: Model(…, {fixed[0]}=…)"
            )
        columns = {"user": user, "prompt": prompt, "messages": messages, "token_ids": token_ids}
        parts = {key: dict(keys) for key, keys in self._parts.items()} | parts_of(settings)
        return answer(data, columns, parts, raw=raw, stream=stream, progress=progress, start=self._start)

    def close(self) -> None:
        """End the ranks; a running call is stopped as by Ctrl-C. Further calls do nothing."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is not None:
            process.let_end()
            process.wait()

    def __enter__(self) -> Model:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise ConfigError("a Model belongs to the process that made it and cannot be pickled; make one in each process")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _start(self, command: str, job: JobConfig, progress: Progress) -> Iterator[CommandProcess]:
        """Run a command in the model's process, which is started if there is none."""
        if self._maker != os.getpid():
            raise ConfigError("this Model was made by another process; make one in each process")
        if self._caller == threading.get_ident():
            raise ConfigError("an earlier call of this thread has not ended; use up its iterator or close it")
        with self._lock:
            if self._is_closed:
                raise ConfigError("this Model is closed; make another one")
            if self._process is None or self._process.is_ending:
                self._process = OwnProcess(uses_terminal=is_terminal())
            self._caller = threading.get_ident()
            try:
                with CommandProcess(command, job, progress, held=self._process) as process:
                    yield process
            finally:
                self._caller = None


def _instead_of(key: str) -> str:
    """Return the remedy for a setting that a Model does not have."""
    if key in CallSettings.__annotations__:
        return f"give it to a call: model.generate(…, {key}=…)"
    return did_you_mean(key, FIXED) or instead_of(key)
