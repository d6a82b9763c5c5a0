"""Conditional writes on a real S3 server, with answers that get lost."""

import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from batchinfer.config import S3Config
from batchinfer.data import bucket as bucket_module
from batchinfer.data import stores
from batchinfer.data.bucket import Bucket
from batchinfer.records import ConfigError, StoreError
from support.faulty_store import Faults, faulty_store
from support.s3_servers import server_with

pytest.importorskip("obstore")


server = server_with("runs")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(bucket_module, "REQUEST_S", 0.5)


def bucket_at(url, folder):
    return Bucket(f"s3://runs/{folder}", S3Config(endpoint=url))


def test_an_object_is_created_once_and_replaced_by_who_saw_it_last(server):
    here = bucket_at(server.endpoint, "once")
    version = here.create("a/name", b"first")
    assert version is not None
    assert here.create("a/name", b"second") is None
    newer = here.replace("a/name", b"third", version)
    assert newer is not None
    assert here.replace("a/name", b"fourth", version) is None
    assert here.read("a/name") == bucket_module.Found(b"third", newer)
    assert here.replace("not/there", b"x", version) is None
    assert here.read("not/there") is None
    here.put("a/other", b"12345")
    assert [(item.name, item.num_bytes) for item in here.objects("a")] == [("a/name", 5), ("a/other", 5)]
    here.delete("a/name")
    here.delete("a/name")
    assert here.read("a/name") is None


def test_a_file_is_put_and_fetched_in_pieces(server, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_module, "CHUNK_BYTES", 5 << 20)
    here, source, target = bucket_at(server.endpoint, "files"), tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * (48 << 10))  # 12 MiB
    here.put("large", source)
    assert here.fetch("large", target)
    assert target.read_bytes() == source.read_bytes()
    assert not here.fetch("nothing", target)


@pytest.mark.parametrize("fault", ["500", "503", "lost", "timeout", "late"])
def test_a_write_whose_answer_is_lost_is_known_for_what_it_did(server, fault):
    """Many requests fail. Only the caller whose write succeeded gets a version back."""
    with faulty_store(
        server, Faults(share=0.3, kinds=(fault,), hold_s=0.6, most=4 if fault == "timeout" else 20)
    ) as url:
        here = bucket_at(url, f"lost-{fault}")
        for number in range(8):
            name, mine = f"name-{number}", f"mine {number}".encode()
            version = here.create(name, mine)
            assert version is not None
            assert here.create(name, b"another") is None
            newer = here.replace(name, mine + b", newer", version)
            assert newer is not None
            assert here.replace(name, b"too late", version) is None
            assert here.read(name).data == mine + b", newer"


def winners(write, text):
    """Return the writers, of four at once, whose write is reported to have succeeded."""
    won = []

    def attempt(me):
        if write(f"{text} {me}".encode()) is not None:
            won.append(me)

    threads = [threading.Thread(target=attempt, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_of_many_that_create_or_replace_at_once_one_succeeds(server):
    faults = Faults(share=0.25, kinds=("500", "lost", "late"), seed=1)
    with faulty_store(server, faults) as url:
        here = bucket_at(url, "races")
        for number in range(6):
            assert len(winners(partial(here.create, f"name-{number}"), "first of")) == 1
            version = here.read(f"name-{number}").version
            assert len(winners(partial(here.replace, f"name-{number}", version=version), "second of")) == 1
    assert faults.injected["lost"] > 0
    assert (faults.most_writes > 1) == server.is_atomic


def test_a_store_that_goes_on_failing_is_one_sentence(server):
    with faulty_store(server, Faults(share=1.0, kinds=("503",))) as url:
        here = bucket_at(url, "down")
        with pytest.raises(StoreError, match="cannot write s3://runs/down/name: SlowDown: injected; check the bucket"):
            here.create("name", b"x")
    assert here.requests["put"] == bucket_module.ATTEMPTS


def test_a_store_that_wants_no_quotes_in_if_match_is_served(server):
    """Ceph's gateway wants none. The first replacement finds that out, the next ones use it."""
    with faulty_store(server, Faults(conditions="unquoted")) as url:
        here = bucket_at(url, "unquoted")
        version = here.create("name", b"first")
        newer = here.replace("name", b"second", version)
        assert dict(here.requests) == {"put": 3, "get": 1}
        assert here.replace("name", b"third", version) is None
        assert here.replace("name", b"third", newer) is not None
    assert dict(here.requests) == {"put": 5, "get": 2}


def test_a_refusal_that_comes_as_an_error_is_known_for_what_it_is(server):
    """Ceph's gateway answers so to the loser of a race."""
    with faulty_store(server, Faults(conditions="unnamed")) as url:
        here = bucket_at(url, "unnamed")
        version = here.create("name", b"first")
        with faulty_store(server, Faults()) as plain:
            assert bucket_at(plain, "unnamed").replace("name", b"another's", version) is not None
        assert here.create("name", b"second") is None
        assert here.replace("name", b"third", version) is None
    assert dict(here.requests) == {"put": 3, "get": 2}


@pytest.mark.slow
def test_a_folder_of_many_objects_is_listed_page_by_page(server, monkeypatch):
    monkeypatch.setattr(bucket_module, "REQUEST_S", stores.REQUEST_S)  # moto may take a second for a page
    here = bucket_at(server.endpoint, "many")
    names = [f"folder/{number:06d}" for number in range(2100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: here.create(name, b"x"), names))
    assert [item.name for item in here.objects("folder")] == names
    assert here.requests["list"] == 3


def test_keys_come_from_a_profile_where_the_environment_has_none(monkeypatch, tmp_path):
    from batchinfer.data.profiles import profile_keys

    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = A\naws_secret_access_key = S%S\n")
    (tmp_path / "config").write_text("[profile sso]\nsso_session = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    assert profile_keys() == {}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert profile_keys() == {"access_key_id": "A", "secret_access_key": "S%S"}
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(ConfigError, match="AWS_PROFILE is sso, but no keys of that profile"):
        profile_keys()


def test_a_user_without_a_home_has_no_profile(monkeypatch):
    from batchinfer.data import profiles

    def nobody(uid):
        raise KeyError(uid)

    for variable in ("HOME", "AWS_CONFIG_FILE", "AWS_PROFILE", *profiles._OTHER_SOURCES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/credentials")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert profiles.profile_keys() == {}
