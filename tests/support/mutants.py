"""Small sabotages of the product, each of which the tests nearest to it must catch: `make mutants`.

tests/mutants/mutants.toml lists them. Each runs in a copy of the source tree: the working tree is only read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutants" / "mutants.toml"
TIMEOUT_S = 300.0
_TESTS_FAILED, _TESTS_PASSED = 1, 0  # pytest's exit codes; others say that it could not run them


class MutantError(Exception):
    """A mutant of the list cannot be made or judged; the message names it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file, and the tests of which one must fail then.

    in_test_all: it is one of the share that `make test-all` runs, because its tests are quick.
    """

    name: str
    file: str
    old: str  # occurs in the file exactly once
    new: str
    tests: str  # arguments of pytest, with spaces between
    in_test_all: bool = False


def read_mutants() -> list[Mutant]:
    """The list."""
    mutants = [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]
    for mutant in mutants:
        if sum(mutant.name == other.name for other in mutants) > 1:
            raise MutantError(f"{mutant.name!r} is in {LIST.name} twice; rename one")
    return mutants


def mutated(mutant: Mutant) -> str:
    """The text of its file with the change.

    Raises:
        MutantError: the old text is not there, or more than once, or it is the new one.
    """
    path = ROOT / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    count = text.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        raise MutantError(
            f"{mutant.name!r}: its old text stands {count} times in {mutant.file}, not once, or equals the new one; "
            f"correct it in {LIST.name}"
        )
    return text.replace(mutant.old, mutant.new)


def is_caught(mutant: Mutant) -> bool:
    """Whether its tests fail in a copy of the tree with the change.

    Raises:
        MutantError: it cannot be made, or its tests could not run, or not within TIMEOUT_S.
    """
    text = mutated(mutant)
    with _copied_tree() as tree:
        (tree / mutant.file).write_text(text, encoding="utf-8")
        return _run_tests(tree, mutant.name, mutant.tests.split()).returncode == _TESTS_FAILED


def check_unchanged(mutants: Sequence[Mutant]) -> None:
    """Make sure that the tests of these mutants pass without them: only then does it mean anything that one fails.

    Raises:
        MutantError: one fails.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests.split()})
    with _copied_tree() as tree:
        ended = _run_tests(tree, "no mutant", tests, timeout_s=10 * TIMEOUT_S)
        if ended.returncode == _TESTS_FAILED:
            raise MutantError(f"tests fail without any mutant: correct them first\n{_last_lines(ended)}")


def _run_tests(
    tree: Path, name: str, tests: Sequence[str], *, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run these tests in this copy of the tree, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    paths = {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")]), "TMPDIR": str(tree.parent)}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=os.environ | paths, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise MutantError(f"{name!r}: its tests take longer than {timeout_s:.0f} s; name fewer") from None
    if ended.returncode not in (_TESTS_FAILED, _TESTS_PASSED):
        raise MutantError(f"{name!r}: pytest cannot run {' '.join(tests)}:\n{_last_lines(ended)}")
    return ended


def _last_lines(ended: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])


@contextmanager
def _copied_tree() -> Iterator[Path]:
    """Yield a folder with a copy of all files that git knows or would add."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, check=True).stdout.decode().split("\0")
    with tempfile.TemporaryDirectory(prefix="batchinfer-mutant-") as folder:
        os.chmod(folder, 0o755)  # some tests are another user, who must come through
        tree = Path(folder) / "tree"
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)
        yield tree


def main() -> int:
    """Run the mutants whose names hold one of the words given, all without; 1 when one survives."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in read_mutants() if not options.words or any(word in m.name for word in options.words)]
    for mutant in chosen:
        mutated(mutant)  # errors of the list are reported before anything runs
    check_unchanged(chosen)

    def judge(mutant: Mutant) -> bool:
        try:
            caught = is_caught(mutant)
        except MutantError as error:
            print(f"ERROR: {error}", flush=True)
            return False
        print(f"{'caught' if caught else 'SURVIVED'}: {mutant.name}", flush=True)
        return caught

    with ThreadPoolExecutor(options.jobs) as threads:
        num_caught = sum(threads.map(judge, chosen))
    print(f"{num_caught} of {len(chosen)} mutants were caught")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutantError as error:
        sys.exit(f"error: {error}")
