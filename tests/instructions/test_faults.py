"""Faults that make something take a few per cent more are found, and the functions that they are in are named."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.instructions.callgrind import measure
from tests.instructions.earlier import ROOT, keep_bytecode
from tests.instructions.verdicts import judge

#: The case that takes 3 to 5 % more, the file, what stands there once, how often nothing is done before it, in which function.
FAULTS = (
    (
        "request",
        "shmring/client/client.py",
        "        with self._deadlines.within(timeout, why_not_sent) as deadline:\n            while True:\n",
        24,
        "Client.request",
    ),
    ("chat", "frontend/openai/choices.py", "        choices = []\n", 350, "ChoicesWriter.whole"),
    (
        "streamed token",
        "engine/core.py",
        "        to_forget, self._to_forget = self._to_forget, {}\n",
        50,
        "EngineCore._step",
    ),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_faults_of_a_few_per_cent_are_found_and_named(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty"
    for package in ("shmring", "engine", "frontend"):
        shutil.copytree(ROOT / package, faulty / package, symlinks=True)
    for _, file, old, rounds, _ in FAULTS:
        text = (faulty / file).read_text()
        assert text.count(old) == 1, file
        indent = " " * (len(old) - len(old.lstrip()))
        (faulty / file).write_text(text.replace(old, f"{indent}for _ in range({rounds}):\n{indent}    _ = None\n{old}"))
    cases = [case for case, *_ in FAULTS]
    for checkout in (ROOT, faulty):
        keep_bytecode(checkout)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        before, now = pool.map(lambda checkout: measure(checkout, cases), (ROOT, faulty))
    for case, _, _, _, function in FAULTS:
        verdict = judge(case, before[case], now[case])
        assert verdict.is_red, verdict.text
        assert f": {function}" in verdict.text, verdict.text
