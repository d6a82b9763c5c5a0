"""Checks of owner and permissions of folders that this program trusts."""

import grp
import os
import pwd
import stat
from types import SimpleNamespace

import pytest

from batchinfer import ownership
from batchinfer.ownership import check_folder, group_id, make_folder
from batchinfer.records import ConfigError
from support.other_user import NOBODY, as_user


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_new_folder_is_private_from_its_first_moment(tmp_path, umask, monkeypatch):
    modes = []
    plain = os.chmod
    monkeypatch.setattr(os, "chmod", lambda path, mode: (modes.append(mode), plain(path, mode)))
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "private", None)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "private") == 0o700
    assert modes == []  # nothing had to be taken back


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir(0o750)
    make_folder(tmp_path / "mine", None)
    assert mode_of(tmp_path / "mine") == 0o750
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file", None)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_ones_own_folder_is_trusted_when_others_may_only_read_it(tmp_path, mode):
    tmp_path.chmod(mode)
    assert check_folder(tmp_path, None, setting="output.dir") is None


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_folder_that_everybody_may_write_is_refused_with_the_command_that_repairs_it(tmp_path, mode):
    folder = tmp_path / "a folder"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=r"every user.*run `chmod go-w '.*a folder'`, or choose another output.dir"):
        check_folder(folder, None, setting="output.dir")


def test_a_users_own_group_of_one_counts_as_the_user(tmp_path, monkeypatch):
    """A user's folders are writable by the user's own group if umask is 002, a common default."""
    tmp_path.chmod(0o775)
    uid, gid = tmp_path.stat().st_uid, tmp_path.stat().st_gid
    if uid != gid or grp.getgrgid(gid).gr_name != pwd.getpwuid(uid).pw_name:
        pytest.skip("NOT TESTED: this user has no group of the same name")
    assert check_folder(tmp_path, None, setting="output.dir") is None
    group = SimpleNamespace(gr_name=pwd.getpwuid(uid).pw_name, gr_mem=["somebody"])
    monkeypatch.setattr(ownership.grp, "getgrgid", lambda _: group)
    with pytest.raises(ConfigError, match="can be written by group"):
        check_folder(tmp_path, None, setting="output.dir")


@pytest.mark.parametrize(("uid", "gid", "is_private"), [(54321, 54321, True), (54321, 54322, False)])
def test_a_user_without_a_name_has_a_group_of_the_same_number(tmp_path, uid, gid, is_private):
    """The case is root in a container, with a folder of a user of the host."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can give a folder away")
    os.chown(tmp_path, uid, gid)
    tmp_path.chmod(0o775)
    if is_private:
        assert "belongs to user 54321" in (check_folder(tmp_path, None, setting="output.dir") or "")
    else:
        with pytest.raises(ConfigError, match="can be written by group 54322"):
            check_folder(tmp_path, None, setting="output.dir")


def test_root_runs_no_other_users_code(tmp_path):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can give a folder away")
    os.chown(tmp_path, NOBODY, -1)
    assert "belongs to user nobody" in (check_folder(tmp_path, None, setting="output.dir") or "")
    with pytest.raises(ConfigError, match="belongs to user nobody"):
        check_folder(tmp_path, None, setting="XDG_CACHE_HOME", also_root=True)


def test_roots_folders_are_trusted_by_everybody_and_other_peoples_by_nobody(everyones_folder):
    mine, roots, foreign = (everyones_folder / name for name in ("mine", "roots", "foreign"))
    for folder in (mine, roots, foreign):
        folder.mkdir(0o755)

    def check():
        assert check_folder(mine, None, setting="output.dir") is None
        assert check_folder(roots, None, setting="output.dir") is None
        with pytest.raises(ConfigError, match=r"belongs to user 12345.*or share it within a group by output.shared_gr"):
            check_folder(foreign, None, setting="output.dir")

    if os.getuid() == 0:
        os.chown(mine, NOBODY, NOBODY)
        os.chown(foreign, 12345, -1)
    assert as_user(check) == 0


def test_groups_by_name_and_by_number():
    group = grp.getgrgid(os.getegid())
    assert group_id(None, "output.shared_group") is None
    assert group_id(group.gr_name, "output.shared_group") == group.gr_gid
    assert group_id(str(group.gr_gid), "output.shared_group") == group.gr_gid
    for name in ("no-such-group", "", "4" * 30):
        with pytest.raises(ConfigError, match=r"output.shared_group is"):
            group_id(name, "output.shared_group")


def test_only_members_share_with_a_group():
    def check():
        with pytest.raises(ConfigError, match="is no member of it"):
            group_id("4242", "kv.shared_group")

    assert as_user(check) == 0
    assert as_user(lambda: group_id("4242", "kv.shared_group"), groups=[4242]) == 0
