"""The space of a frontend's numbers is there before they are counted, or the frontend does without it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from shmring.frontend.operator import number_files
from shmring.frontend.operator.metrics import COUNTED
from shmring.frontend.operator.number_files import DIRECTORY_VARIABLE, reserve_number_files
from tests.nursery import Nursery

COUNTING = """if True:
    import logging, os, resource, sys
    logging.basicConfig()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
    if (most := int(sys.argv[2])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    from shmring.frontend.operator.number_files import DIRECTORY_VARIABLE, reserve_number_files
    reserve_number_files(100)
    from shmring.frontend.operator.metrics import FrontendMetrics
    metrics = FrontendMetrics(["test"])
    for route in range(30):
        for status in range(200, 210):
            metrics.http.requests[f"/v1/route/{route}", str(status)] += 1
            metrics.http.failures[f"/v1/route/{route}", f"reason_{status}"] += 1
        metrics.http.seconds[f"/v1/route/{route}",].add(0.1)
    for owner in range(100):
        for status in range(200, 210):
            metrics.http.key_requests[f"owner-{owner}-of-some-length", str(status)] += 1
    metrics.take_over_own()
    print(DIRECTORY_VARIABLE in os.environ, metrics._render({}).decode().count("shmring_http_requests_total{"))
"""


def count(nursery: Nursery, directory: Path, most_nbytes: int = 0) -> subprocess.CompletedProcess[str]:
    done = nursery.run_text(COUNTING, str(directory), str(most_nbytes))
    assert done.returncode == 0, done.stderr
    return done


def test_all_that_a_frontend_counts_fits_into_what_was_reserved(nursery: Nursery, tmp_path: Path) -> None:
    assert count(nursery, tmp_path).stdout.split() == ["True", "300"]
    files = list(tmp_path.iterdir())
    assert {path.name.rpartition("_")[0] for path in files} == set(number_files._KINDS), "it makes no others"
    for path in files:
        status = path.stat()
        assert status.st_size == number_files._NBYTES + 100 * number_files._OWNER_NBYTES, "none has grown"
        assert status.st_blocks * 512 >= status.st_size, "none is sparse"


def test_without_the_space_it_counts_for_itself_and_says_so(nursery: Nursery, tmp_path: Path) -> None:
    result = count(nursery, tmp_path, most_nbytes=4096)  # as a full disk, but without one
    assert result.stdout.split() == ["False", "300"]
    assert f"no space for numbers in {tmp_path}, so /metrics of this frontend shows its own ones only" in result.stderr
    assert not list(tmp_path.iterdir())


def test_there_is_a_file_for_each_kind_of_number() -> None:
    kinds = {f"gauge_{each.across_frontends}" if each.kind == "gauge" else each.kind for each in COUNTED}
    assert kinds == set(number_files._KINDS)


def test_a_frontend_by_itself_has_no_files() -> None:
    assert DIRECTORY_VARIABLE not in os.environ
    reserve_number_files(0)
