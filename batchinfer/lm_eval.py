"""A backend of lm-evaluation-harness named `batchinfer`: a model folder whose requests become jobs.

    python -m batchinfer.lm_eval run --model batchinfer --model_args path=MODEL,dtype=fp8 --tasks hellaswag

Releases of lm-eval after 0.4.13 find the backend by the entry point lm_eval.models; run as a command, this module adds
it to earlier releases. lm-eval is no dependency: nothing else imports this module.
"""

import hashlib
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from batchinfer.stop_signals import StopSignal, exit_when_interrupted, ignore_signals

if __name__ == "__main__":  # the imports below take seconds
    exit_when_interrupted()

import pyarrow as pa
import pyarrow.parquet as pq
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from batchinfer import own_process
from batchinfer.config import JobConfig, SamplingConfig, checked, dump_job
from batchinfer.config.model_folder import model_folder
from batchinfer.data.chat import ChatError
from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.data.row_prompts import template_variables
from batchinfer.data.row_values import RowError
from batchinfer.data.text_loss import load_checked_tokenizer
from batchinfer.model.config import load_model_config
from batchinfer.progress import note
from batchinfer.records import BatchinferError, ConfigError, ExitCode, InterruptedRunError
from batchinfer.sanitize import clip, count_text, sanitize

MOST_CHOICES = 64  # of one row; further choices of the same context go to more rows
_TOKEN_IDS = pa.list_(pa.int32())
# modules of lm-eval that check its own arguments
_CHECK_ARGUMENTS = ("lm_eval.config.evaluate_config", "lm_eval.api.registry", "lm_eval.evaluator")
Parts = dict[str, dict[str, Any]]  # of a job file
_ScoreRequest = tuple[tuple[str, str], list[int], list[int]]  # (texts, context, continuation)


class BatchinferLM(TemplateLM):
    """A backend that scores and generates with a model folder: each call of lm-eval is one job on this machine.

    Args:
        path: the model folder, or owner/name of one in the Hugging Face cache.
        work_dir: folder for the jobs, in which a stopped evaluation resumes; unset: a temporary one.
        max_length: most tokens that the model reads for a request; unset: one less than its window, since a job's
            prompt and choice share the window, and the last token is only predicted.
        batch_size, max_batch_size, device: lm-eval passes them to each backend; here ranks form their own batches, on
            the devices of cluster.backend.
        settings: dtype, and any part.key=value of the job file. Jobs get token ids, so variables for the chat template
            (input.chat_template_kwargs) are used here.

    Raises:
        ConfigError: an argument is missing or wrong, or a key of settings is none of these.
        ModelError: the folder holds no model.
    """

    def __init__(
        self,
        path: str | None = None,
        work_dir: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if path is None:
            raise ConfigError("model_args has no path; write --model_args path=DIR, the model's folder")
        for name, value in {"path": path, "work_dir": work_dir}.items():
            if not isinstance(value, str | None):
                raise ConfigError(f"{name} is {value!r}, not text; write a folder with such a name as {name}=./NAME")
        self._path = Path(model_folder(Path.cwd(), path))
        parts: Parts = {"model": {"path": str(self._path)}}
        for key, value in settings.items():
            part, dot, name = "model.dtype".partition(".") if key == "dtype" else key.partition(".")
            if not dot:
                raise ConfigError(
                    f"{key} is no model argument of batchinfer; use path, dtype, work_dir, max_length or a part.key of "
                    "the job file, such as cluster.prefill_ranks"
                )
            parts.setdefault(part, {})[name] = value
        self._variables = _template_variables(parts)
        self.jobs = Jobs(None if work_dir is None else Path(work_dir).absolute(), parts)
        config = load_model_config(self._path)
        self._tokenizer = load_checked_tokenizer(self._path)
        if max_length is not None and not (isinstance(max_length, int) and max_length > 0):
            raise ConfigError(f"max_length is {max_length!r}, but it should be a whole number above 0")
        self.max_length = max_length or config.max_positions - 1
        self.max_gen_toks = 256

    # ---- lm-eval's interface to the tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._token_id("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._token_id("bos_token" if "bos_token" in self._tokenizer.named_tokens else "eos_token")

    @property
    def tokenizer_name(self) -> str:
        return str(self._path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; a text that begins with the beginning-of-text token gets no second one."""
        if add_special_tokens is None:
            names = self._tokenizer.named_tokens
            beginning = names.get("bos_token") or names.get("eos_token")
            add_special_tokens = beginning is None or not string.startswith(beginning)
        (ids,) = self._tokenizer.encode_prompts([string], special=add_special_tokens)
        if isinstance(ids, str):
            raise BatchinferError(f"a text of the task cannot be used: {ids}")
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = self._tokenizer.chat_template()
        try:
            return template.render(chat_history, self._variables, continues=not add_generation_prompt)
        except ChatError as error:
            raise BatchinferError(f"a chat of the task cannot be used: {error}") from None

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.template_text() if chat_template else None

    def _token_id(self, name: str) -> int:
        found = self._tokenizer.token_id(self._tokenizer.named_tokens.get(name, ""))
        if found is None:
            raise BatchinferError(f"the tokenizer of {self._path} has no {name}, which lm-eval needs")
        return found

    # ---- requests

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in lm-eval's windows."""
        texts, windows = [], []
        for place, request in enumerate(requests):
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            ):
                texts.append(place)
                windows.append((("", ""), *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for place, (logprob, _) in zip(texts, self._loglikelihood_tokens(windows), strict=True):
            totals[place] += logprob
        return totals

    def _loglikelihood_tokens(self, requests: list[_ScoreRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of each continuation; those of one context are the choices of one row."""
        rows: list[tuple[tuple[int, ...], list[int]]] = []  # (context, places of its continuations)
        of_context: dict[tuple[int, ...], list[int]] = {}
        num_cut = 0
        for place, (texts, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise BatchinferError(
                    f"a continuation of {len(continuation)} tokens cannot be scored with max_length = "
                    f"{self.max_length}: {texts[1]!r}"
                )
            most = self.max_length + 1 - len(continuation)
            num_cut += len(context) > most
            kept = tuple(context[-most:])
            if kept not in of_context or len(of_context[kept]) == MOST_CHOICES:
                of_context[kept] = []
                rows.append((kept, of_context[kept]))
            of_context[kept].append(place)
        _note_cut(num_cut, self.max_length)
        choices = [[requests[place][2] for place in places] for _, places in rows]
        outputs = self.jobs.outputs(
            {
                "prompt": pa.array([list(context) for context, _ in rows], _TOKEN_IDS),
                "choices": pa.array(choices, pa.list_(_TOKEN_IDS)),
            },
            {"input": {"choices": "choices"}, "sampling": {"max_tokens": 0}},
        )
        results: dict[int, tuple[float, bool]] = {}
        for (_, places), row in zip(rows, outputs, strict=True):
            scored = zip(row["choice_logprobs"], row["choice_is_greedy"], strict=True)
            results |= dict(zip(places, scored, strict=True))
        return [results[place] for place in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers; each row has the sampling of its request."""
        prompts, samplings, num_cut = [], [], 0
        for context, gen_kwargs in (request.args for request in requests):
            wanted = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
            sampling = _row_sampling(dict(wanted), self._tokenizer, self.eot_token_id)
            most = self.max_length - sampling["max_tokens"]
            if most < 1:
                raise BatchinferError(
                    f"max_gen_toks is {sampling['max_tokens']}, which leaves no room in max_length = {self.max_length}"
                )
            prompt = self.tok_encode(context)
            num_cut += len(prompt) > most
            prompts.append(prompt[-most:])
            samplings.append(sampling)
        _note_cut(num_cut, self.max_length)
        rows = self.jobs.outputs(
            {"prompt": pa.array(prompts, _TOKEN_IDS), "sampling": pa.array(samplings)},
            {"input": {"sampling": "sampling"}, "sampling": {"max_tokens": self.max_gen_toks}},
        )
        return _answers(rows)


def _template_variables(parts: Parts) -> dict[str, Any]:
    """Take the variables for the chat template out of the parts of a job file.

    Raises:
        ConfigError: they are not a table, or one of them has a wrong value.
    """
    name = "input.chat_template_kwargs"
    given = parts.get("input", {}).pop("chat_template_kwargs", None)
    chats = {"files": ["prompts.parquet"], "messages": "messages", "chat_template_kwargs": given}
    job = {"input": chats, "output": {"dir": "run"}, "model": {"path": "model"}, "sampling": {"max_tokens": 1}}
    found = checked(JobConfig, job, Path("model_args")).input.chat_template_kwargs
    if isinstance(found, str):
        raise ConfigError(f'model_args: {name} is {found!r}, not a table such as {{"enable_thinking": false}}')
    try:
        return template_variables(name, found or {})
    except RowError as error:
        raise ConfigError(f"model_args: {error}") from None


def _note_cut(num_cut: int, max_length: int) -> None:
    if num_cut:
        are_cut = "is cut at its beginning" if num_cut == 1 else "are cut at their beginning"
        note(f"warning: {count_text(num_cut, 'context')} {are_cut} to fit max_length = {max_length:,}")


def _answers(rows: list[dict[str, Any]]) -> list[str]:
    """Return the texts; warn of answers that were cut or are empty, whose scores say little about the model."""
    cut = [row for row in rows if row["finish_reason"] == "length"]
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    if cut:
        num_empty = sum(map(_is_all_thinking, cut))
        empty = f", {num_empty:,} of them in their thinking, so that they are empty" if num_empty else ""
        note(f"warning: {len(cut):,} of {len(rows):,} answers were cut at max_gen_toks{empty}; raise max_gen_toks")
    if num_empty := sum(map(_is_all_thinking, ended)):
        note(f"warning: {num_empty:,} of {len(rows):,} answers ended in their thinking, so that they are empty")
    return [row["text"] for row in rows]


def _is_all_thinking(row: dict[str, Any]) -> bool:
    num_tokens: int = row.get("reasoning_tokens", 0)
    return num_tokens > 0 and num_tokens == row["completion_tokens"]


def _row_sampling(wanted: dict[str, Any], tokenizer: PromptTokenizer, eot_token_id: int) -> dict[str, Any]:
    """Return a row's sampling; a stop that is a control token has no text in an answer and is passed by its id."""
    texts = [text for text in wanted.pop("until") if text]
    control = tokenizer.control
    ids = [tokenizer.token_id(text) for text in texts if control.first_in(text) == text]
    sampling = {
        "max_tokens": wanted.pop("max_gen_toks"),
        "temperature": float(wanted.pop("temperature", 0.0)) if wanted.pop("do_sample") else 0.0,
        "stop": [text for text in texts if control.first_in(text) != text],
        "stop_token_ids": sorted({eot_token_id, *(found for found in ids if found is not None)}),
    }
    unknown = wanted.keys() - SamplingConfig.model_fields.keys()
    if unknown:
        raise BatchinferError(f"generation_kwargs of the task has {', '.join(sorted(unknown))}, which is not known")
    return sampling | wanted


class _FailedJobError(BatchinferError):
    """A job failed, whose command has said why; its exit code is that of the evaluation."""

    def __init__(self, job: Path, code: int) -> None:
        super().__init__(f"batchinfer run {job} ended with exit code {code}; its messages are above")
        self.exit_code = code if code > 0 else ExitCode.INTERNAL  # below 0: a signal


class Jobs:
    """Runs jobs over token ids with one model and one set of keys, each in a folder named by its content.

    Args:
        folder: of the jobs; unset: a temporary one.
        parts: the job file's parts with their keys, which override those that `outputs` passes.
    """

    def __init__(self, folder: Path | None, parts: Parts) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="lm_eval-") if folder is None else None
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self._parts = parts

    def outputs(self, columns: dict[str, pa.Array], keys: Parts) -> list[dict[str, Any]]:
        """Run a job over these columns, of which `prompt` holds token ids, and return its output rows.

        Raises:
            ConfigError: a key of the job is wrong, or its folder cannot be written.
            BatchinferError: the job fails, or a row is an error row.
        """
        if len(columns["prompt"]) == 0:
            return []
        table = pa.table({"id": pa.array(range(len(columns["prompt"]))), **columns})
        try:
            folder = self._written(table, keys)
        except OSError as error:
            raise ConfigError(f"work_dir cannot be used: {error}") from None
        job = folder / "job.toml"
        # in a child process, free of the libraries and memory of lm-eval's process
        command = own_process.command("batchinfer", "run", str(job))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            try:
                code = running.wait()
            except BaseException:
                running.terminate()  # a signal may have reached this process alone
                running.wait()  # until finished work is kept
                raise
        if code not in (ExitCode.OK, ExitCode.ROW_ERRORS):
            raise _FailedJobError(job, code)
        rows: list[dict[str, Any]] = pq.read_table(folder / "run" / "outputs").to_pylist()
        for row in rows:
            if row["status"] != "ok":
                raise BatchinferError(f"request {row['row']} of {job} failed: {row['error']}")
        return rows

    def _written(self, table: pa.Table, keys: Parts) -> Path:
        """Write shard and job file and return their folder; the same job has the same folder, where it resumes."""
        parts: Parts = {
            "input": {"files": ["prompts.parquet"], "token_ids": "prompt"},
            "output": {"dir": "run"},
        }
        for given in (keys, self._parts):
            for part, values in given.items():
                parts[part] = parts.get(part, {}) | values
        text = dump_job(checked(JobConfig, parts, Path("model_args")))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        shard = sink.getvalue().to_pybytes()
        folder = self.folder / hashlib.blake2b(text.encode() + shard, digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.parquet").write_bytes(shard)
        (folder / "job.toml").write_text(text, encoding="utf-8")
        return folder


def main() -> None:
    """Run lm-eval's own command with this backend; wrong arguments and signals end it with a sentence and exit code."""
    try:
        stop = StopSignal()
        _evaluate()
        stop.check()
    except InterruptedRunError as stopped:
        ignore_signals()
        reason, *_ = str(stopped).split(";")
        rest = "the same command goes on if --model_args has a work_dir, else it begins again"
        print(f"{reason}; {rest}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except BatchinferError as error:
        _end(error.sentences, error.exit_code)
    except (ValueError, FileNotFoundError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals["__name__"] not in _CHECK_ARGUMENTS:
            raise
        _end([str(error)], ExitCode.BAD_JOB)


def _evaluate() -> None:
    import lm_eval.models  # noqa: F401  (registers lm-eval's own backends, which it does only in an empty registry)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "batchinfer" not in model_registry:
        model_registry.register("batchinfer", target="batchinfer.lm_eval:BatchinferLM")
    cli_evaluate()


def _end(sentences: list[str], code: int) -> NoReturn:
    for sentence in sentences:
        print(f"error: {sanitize(clip(sentence))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
