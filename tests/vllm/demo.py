"""A program: starts vLLM with the plug-in and two API servers, asks about a picture, and prints what went through the slab.

``make demo-vllm``. The model is made up, and so are its answers; what is shown is the way of the picture's pixels.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from bench.servers import picture
from bench.vllm.server import Server, serve

SIDE = 1344
QUESTIONS = 8


def main() -> None:
    print("Starting vLLM with SHMRING_VLLM=1, two API servers and an engine core, on the CPU (half a minute) ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        try:
            with serve(Path(directory), side=SIDE, api_servers=2, environment={"SHMRING_VLLM": "1"}) as server:
                show(server)
        except RuntimeError as error:
            sys.exit(str(error))


def show(server: Server) -> None:
    for line in server.log.splitlines():
        if "shmring:" in line:
            print("  log:", line[line.index("shmring:") :])
    url = picture(SIDE, 1)
    print(f"\nAsking {QUESTIONS} times about one picture of {SIDE} x {SIDE}, {SIDE * SIDE * 6 / 1e6:.1f} MB of pixels:\n")
    print(f"  {'':>9} {'seconds':>8}   what went which way so far")
    for number in range(QUESTIONS):
        began_s = time.monotonic()
        answer = server.ask(url, uuid="the picture")
        took_s = time.monotonic() - began_s
        ways = ", ".join(f"{count} {way}" for way, count in sorted(server.tensors().items()))
        print(f"  request {number + 1} {took_s:8.3f}   {ways}   (answer: {answer!r})")
    report = server.engine()
    print(
        f"\nThe engine core took {report['taken']} tensors from the slab, used them {report['hits']} more times without a "
        f"copy,\nand lost {report['lost']}. It keeps {report['kept_tensors']} of {report['kept_bytes'] / 1e6:.1f} MB, one for "
        "each API server that was asked."
    )


if __name__ == "__main__":
    main()
