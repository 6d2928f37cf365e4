"""Fixtures: one cluster for all tests of a run, and a new job name for each test."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

import rapidraid

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[rapidraid.LocalCluster]:
    """A cluster of eight real nodes, so that a code with six pieces has two spares, and a staging daemon."""
    with rapidraid.local_cluster(8, settings={"code.list": "6,4"}) as running:
        yield running


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> str:
    """Returns the name of a new job."""
    caplog.set_level(logging.INFO, logger="rapidraid")
    return f"job-{next(_numbers)}"
