"""Equal things give equal bits in every process, with any number of threads. On another processor they are nearly equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shmring.engine.fingerprints.vectors import FINGERPRINT_SIZE, Numbers, length_of, product
from tests.tables import for_each

REPOSITORY = Path(__file__).resolve().parents[3]
KINDS = ("picture", "photograph", "sound", "clip", "text")

# As large as what torch shares out between threads: those of a few numbers are never shared out.
FINGERPRINTS = """
import json, sys
import numpy as np, torch
from PIL import Image
from shmring.engine.fingerprints.clips import fingerprint_clip
from shmring.engine.fingerprints.pictures import fingerprint_picture
from shmring.engine.fingerprints.sounds import fingerprint_sound
from shmring.engine.fingerprints.texts import fingerprint_text

torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(1)
pixels = torch.randint(0, 256, (3, 480, 640, 3), dtype=torch.uint8, generator=generator)
photograph = torch.from_numpy(np.array(Image.open("frontend/samples/rocket.jpg").convert("RGB")))
made = {
    "picture": [fingerprint_picture(pixels[0])],
    "photograph": [fingerprint_picture(photograph), fingerprint_picture(photograph[:301, :203])],
    "sound": [fingerprint_sound(torch.randn(frames, 80, generator=generator) * 3 - 5) for frames in (77, 3_001, 20_001)],
    "clip": [fingerprint_clip(pixels, [0.0, 1.0, 2.0], 3.0)],
    "text": [fingerprint_text(f"The quick brown fox number {number} jumps.") for number in range(300)],
}
print(json.dumps({kind: [vector.numpy().tobytes().hex() for vector in fingerprints] for kind, fingerprints in made.items()}))
"""


def start(threads: int, **variables: str) -> subprocess.Popen[bytes]:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return subprocess.Popen(
        [sys.executable, "-c", FINGERPRINTS, str(threads)],
        cwd=REPOSITORY,
        env={**os.environ, **counts, **variables},
        stdout=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def printed() -> dict[str, dict[str, list[str]]]:
    """What processes print of equal things, by their number of threads, and one that takes this for another processor."""
    features = np.show_config(mode="dicts")["SIMD Extensions"]["found"]  # those that NumPy chooses its loops by
    other_processor = {"NPY_DISABLE_CPU_FEATURES": ",".join(features), "ATEN_CPU_CAPABILITY": "default"}
    processes = {str(threads): start(threads) for threads in (1, 2, 4)}
    processes["another processor"] = start(1, **other_processor)
    # All are started before one is waited for: most of their time is importing torch.
    outputs = {name: process.communicate(timeout=100)[0] for name, process in processes.items()}
    assert not any(process.returncode for process in processes.values())
    return {name: json.loads(output) for name, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_equal_bits(printed: dict[str, dict[str, list[str]]], kind: str) -> None:
    assert printed["1"][kind] == printed["2"][kind] == printed["4"][kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_processor_gives_nearly_equal_numbers(printed: dict[str, dict[str, list[str]]], kind: str) -> None:
    for here, there in zip(printed["1"][kind], printed["another processor"][kind], strict=True):
        numbers, others = (np.frombuffer(bytes.fromhex(bits), np.float32) for bits in (here, there))
        assert numbers.shape == (FINGERPRINT_SIZE,)
        assert float(np.abs(numbers - others).max()) < 1e-5


def random_matrix(*shape: int) -> Numbers:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).numpy()


@for_each(("lines", "terms", "columns"), [(1, 1, 1), (3, 80, 5), (2, 10_000, 3)])
def test_a_product_is_what_a_blas_says(lines: int, terms: int, columns: int) -> None:
    left, right = random_matrix(lines, terms), random_matrix(terms, columns)
    assert np.allclose(product(left, right), left @ right, atol=1e-9)
    assert np.isclose(length_of(left), np.linalg.norm(left))
