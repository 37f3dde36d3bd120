"""A camera and a detector that is slower than the camera: what does not fit is dropped, or waits.

    python examples/camera.py detector        # in one terminal
    python examples/camera.py live            # in another: frames that the detector has no time for are dropped
    python examples/camera.py recording       # every frame counts: the reader waits for the detector

Put your camera in the place of `Camera`, and your model in the place of `find_spot`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import torch

import shmring

NAME = "detector"
SHAPE = (480, 640, 3)
NBYTES = shmring.nbytes_for((SHAPE, torch.uint8))
IN_FLIGHT = 2  # frames: one that is looked at, and the next. With more, results come later, and no more of them


class Camera:
    """Stands for a real one: a bright spot that moves. With OpenCV, `read` is `capture.read(pixels.numpy())`."""

    def __init__(self, frames: int = 60, frames_per_second: float = 30.0) -> None:
        self.frames = frames
        self.seconds_per_frame = 1 / frames_per_second

    def read(self, number: int, pixels: torch.Tensor) -> None:
        """Writes a frame into a uint8 tensor of shape `SHAPE`."""
        pixels.fill_(20)
        pixels[200:210, 10 * number % 600 :][:, :10] = 255


def find_spot(pixels: torch.Tensor) -> int:
    """Stands for a model: returns the column of the brightest spot, after 50 ms."""
    time.sleep(0.05)
    return int(pixels[..., 0].amax(dim=0).argmax())


async def run_detector() -> None:
    """Looks at one frame after the other, until Ctrl-C or SIGTERM."""

    async def look(claim: shmring.Claim) -> None:
        await claim.reply(await asyncio.to_thread(find_spot, claim.payload["pixels"]))

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # The engine says how much may wait for it: each camera has IN_FLIGHT frames on the way at most.
    async with shmring.serve(NAME, slab_nbytes="64MiB", max_inflight=IN_FLIGHT) as ring:
        looking = asyncio.create_task(ring.run(look, max_concurrency=1))
        print("the detector is ready", flush=True)
        await stop.wait()
        await ring.close("the detector stops")
        await looking


async def report(number: int, submission: shmring.Submission) -> None:
    """Prints what the detector says of a frame."""
    print(f"frame {number:3}: the spot is at column {await submission.result()}")


async def film_live(camera: Camera) -> None:
    """Sends a frame when the detector has a place for it, and drops it otherwise. Nothing waits, so no frame is old."""
    dropped = 0
    async with shmring.connect(NAME) as client, asyncio.TaskGroup() as reports:
        start = time.monotonic()
        for number in range(camera.frames):
            await asyncio.sleep(start + number * camera.seconds_per_frame - time.monotonic())
            try:
                with client.slot_nowait(NBYTES) as slot:
                    pixels = slot.tensor(SHAPE, torch.uint8)
                    camera.read(number, pixels)
                    submission = client.submit_nowait({"number": number, "pixels": pixels})
            except shmring.WouldBlock:  # no memory, or IN_FLIGHT frames are on the way
                dropped += 1
            else:
                reports.create_task(report(number, submission))
        print(f"{camera.frames - dropped} frames sent, {dropped} dropped", flush=True)


async def film_recording(camera: Camera) -> None:
    """Sends every frame: the reader waits while the detector is busy, and no queue grows."""
    async with shmring.connect(NAME) as client, asyncio.TaskGroup() as reports:
        for number in range(camera.frames):
            async with client.slot(NBYTES) as slot:  # waits for memory
                pixels = slot.tensor(SHAPE, torch.uint8)
                camera.read(number, pixels)
                submission = await client.submit({"number": number, "pixels": pixels})  # waits for a place
            reports.create_task(report(number, submission))
        print(f"{camera.frames} frames sent, 0 dropped", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["detector"]:
            asyncio.run(run_detector())
        case ["live"]:
            asyncio.run(film_live(Camera()))
        case ["recording"]:
            asyncio.run(film_recording(Camera()))
        case _:
            sys.exit(__doc__)
