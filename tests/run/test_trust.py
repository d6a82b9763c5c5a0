"""Who may read and change a run folder: its owner, the group that the job names, and nobody else."""

import os
import shutil
import stat

import pytest

from support.jobs import answers, batchinfer, write_job, write_questions
from support.other_user import as_user, give_away, readable_files
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

TEAM = 4242  # a group that nobody has to have a name for


@pytest.fixture(autouse=True)
def umask():
    """The usual one, which lets everybody read; a shared run changes it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def refusal(*arguments):
    """The one sentence of a command that ends with 2."""
    ended = batchinfer(*arguments)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    return ended.err.strip().splitlines()[-1]


def refused_by_all(job, word):
    """Every command that goes on with a run says the same."""
    run = job.parent / "run"
    for arguments in (["plan", job], ["work", job], ["work", run], ["finish", run], ["status", run], ["retry", run]):
        assert word in refusal(*arguments), arguments


@pytest.fixture
def job(everyones_folder):
    write_questions(everyones_folder / "prompts", (4,))
    model = shutil.copytree(RANDOM_MODEL, everyones_folder / "model")
    for path in (model, *model.iterdir()):
        path.chmod(0o755)
    return write_job(everyones_folder, model={"path": "model"}, kv={"dir": "kv"})


def test_another_user_reads_no_prompt_token_answer_or_kv_of_a_run(job):
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    run, kv = job.parent / "run", job.parent / "kv"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert list(kv.glob("models/*/*/*.kv"))

    def check():
        assert readable_files(run) + readable_files(kv) == []

    assert as_user(check) == 0


def test_commands_of_another_user_get_a_sentence(job):
    assert batchinfer("plan", job).code == 0
    run = job.parent / "run"
    give_away(run, 12345)

    def check_closed():
        for arguments in (["plan", job], ["work", job], ["finish", run], ["status", run], ["report", run]):
            refusal(*arguments)

    assert as_user(check_closed) == 0
    run.chmod(0o755)
    assert as_user(lambda: refused_by_all(job, "belongs to user 12345")) == 0


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_run_folder_that_others_may_write_is_refused_until_it_is_repaired(job, mode):
    run = job.parent / "run"
    run.mkdir()
    run.chmod(mode)
    assert f"chmod go-w {run}" in refusal("plan", job)
    run.chmod(0o755)
    assert batchinfer("plan", job).code == 0
    run.chmod(mode)
    refused_by_all(job, f"chmod go-w {run}")


def test_a_folder_that_its_owner_lets_others_read_stays_so(job):
    run = job.parent / "run"
    run.mkdir(0o755)
    assert batchinfer("plan", job).code == 0
    assert stat.S_IMODE(run.stat().st_mode) == 0o755
    assert stat.S_IMODE((run / "run.json").stat().st_mode) == 0o644  # by the umask


def test_root_goes_on_with_another_users_run_and_says_so(job):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can give a folder away")
    assert batchinfer("plan", job).code == 0
    give_away(job.parent / "run", 12345)
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert "belongs to user 12345" in ended.err


@pytest.mark.parametrize("of_run", first_in_make_test([0o022, 0o077]))
def test_members_of_a_group_plan_work_and_finish_one_run(job, of_run):
    job.parent.chmod(0o777)
    shared = {"shared_group": str(TEAM)}
    write_job(job.parent, model={"path": "model"}, output=shared, kv={"dir": "kv"} | shared)
    run = job.parent / "run"

    def plan():
        os.umask(of_run)
        assert batchinfer("plan", job).code == 0

    def finish():
        os.umask(of_run)
        ended = batchinfer("finish", run)
        assert ended.code == 0, ended.err
        assert batchinfer("report", run).code == 0

    assert as_user(plan, uid=12345, groups=[TEAM]) == 0
    os.umask(of_run)
    ended = batchinfer("work", run)  # by root
    assert ended.code == 0, ended.err
    assert as_user(finish, uid=12346, groups=[TEAM]) == 0
    assert len(answers(run)) == 4
    wrong = {
        path: oct(path.stat().st_mode)
        for path in [run, *run.rglob("*")]
        if path.stat().st_gid != TEAM or path.stat().st_mode & 0o777 != (0o770 if path.is_dir() else 0o660)
    }
    assert wrong == {}

    def check():
        assert readable_files(job.parent / "run") + readable_files(job.parent / "kv") == []

    assert as_user(check) == 0


def test_a_group_must_be_there_and_be_this_users(job):
    def check_member():
        assert "is no member of it" in refusal("plan", job, "--set", f"output.shared_group='{TEAM}'")

    assert as_user(check_member) == 0
    for key in ("output", "kv"):
        said = refusal("plan", job, "--set", f"{key}.shared_group=nobody-has-such-a-group")
        assert f"{key}.shared_group is 'nobody-has-such-a-group'" in said


def test_a_private_run_is_not_shared_by_saying_so(job):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root is in every group")
    assert batchinfer("plan", job).code == 0
    said = refusal("plan", job, "--set", f"output.shared_group='{TEAM}'")
    assert f"not shared with group {TEAM}" in said
    command = said.partition("`")[2].partition("`")[0]
    assert os.system(command) == 0
    assert batchinfer("plan", job, "--set", f"output.shared_group='{TEAM}'").code == 0
    # and a shared one is not private by leaving it out
    assert f"can be written by group {TEAM}" in refusal("plan", job)
