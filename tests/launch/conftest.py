"""The cluster lives for the whole package; a machine without SLURM fails every test here, it does not skip them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        found = Cluster(tmp_path_factory.mktemp("slurm"))
    except RuntimeError as e:
        pytest.fail(str(e), pytrace=False)
    yield found
    found.down()


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with every node idle, before and after."""
    cluster.wait_idle()
    yield cluster
    for job in cluster.run("squeue", "-h", "-o", "%A").split():
        cluster.run("scancel", job, check=False)
    cluster.wait_idle()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder's path with a space and letters beyond ASCII in it."""
    return tmp_path / "läufe und runs" / "run é"
