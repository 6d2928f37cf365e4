"""One cluster for all tests of a run; every job has a name of its own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

import rapidraid

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[rapidraid.LocalCluster]:
    """Eight real daemons, so that a code of six pieces has two spare ones, and a staging daemon."""
    with rapidraid.local_cluster(8, settings={"code.list": "6,4"}) as running:
        yield running


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> str:
    """The name of a new job."""
    caplog.set_level(logging.INFO, logger="rapidraid")
    return f"job-{next(_numbers)}"
