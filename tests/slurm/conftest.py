"""One Slurm for all tests here."""

import os
import warnings
from collections.abc import Iterator

import pytest
from cluster import Cluster, NoSlurmError, install

NUM_NODES = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of four virtual nodes; commands in this process find it."""
    found = None
    try:
        install()
        found = Cluster(NUM_NODES)
        found.start()
    except NoSlurmError as error:
        if found is not None:
            found.stop()
        reason = f"NOT TESTED ON A REAL SLURM: {error}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    os.environ["SLURM_CONF"] = str(found.conf)
    try:
        yield found
    finally:
        found.stop()
        del os.environ["SLURM_CONF"]
