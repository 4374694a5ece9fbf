"""One cluster for the whole package. CI fails where SLURM cannot start; elsewhere these tests are skipped, saying why."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, NoSlurm, require_gone


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    required = os.environ.get("QUADS_REQUIRE_SLURM") == "1" or os.environ.get("CI", "").lower() in ("1", "true")
    try:
        found = Cluster(tmp_path_factory.mktemp("slurm"))
    except NoSlurm as e:
        if required:
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e).splitlines()[0])
    if not found.own_network:
        said = "no right to make networks here: SLURM's nodes share the loopback, tests of addresses are skipped"
        warnings.warn(said, stacklevel=1)
    yield found
    found.down()


@pytest.fixture
def idle(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster with every node idle, before and after, and no process of any run left on any node."""
    cluster.wait_idle()
    yield cluster
    for job in cluster.run("squeue", "-h", "-o", "%A").split():
        cluster.run("scancel", job, check=False)
    cluster.wait_idle()
    require_gone(tmp_path_factory.getbasetemp())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder's path with a space and letters beyond ASCII in it."""
    return tmp_path / "läufe und runs" / "run é"
