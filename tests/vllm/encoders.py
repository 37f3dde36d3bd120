"""A program: one engine of vLLM with a connector for encoder outputs, or without; asked by lines.

``python -m tests.vllm.encoders '{"model": DIRECTORY, "transfer": {...}, "options": {...}}'``, as
:class:`bench.vllm.encoder_engine.EncoderEngine` takes them; ``compiled`` is where the compiled parts of vLLM are, for a vLLM of
which only the sources are here. Each line that comes is JSON, and is answered by a line that begins with ``answer``:

* ``{"ask": [[1], [2, 3]]}``: one request with picture 1, another with pictures 2 and 3;
* ``{"lose": true}``: the next look-up of a worker finds nothing, as when the store ends in that moment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from bench.vllm.encoder_engine import EncoderEngine


def lose(store: Any) -> None:
    """The next look-up finds nothing."""
    find = store.find

    def find_nothing(keys: list[bytes], timeout_s: float) -> list[None]:
        store.find = find
        return [None] * len(keys)

    store.find = find_nothing


def answer(**words: Any) -> None:
    print("answer", json.dumps(words), flush=True)


def main(model: str, transfer: dict[str, Any] | None, options: dict[str, Any], compiled: str = "") -> None:
    if compiled:
        import vllm

        vllm.__path__.append(compiled)
    engine = EncoderEngine(model, transfer, options)
    answer(ready=True)
    for line in sys.stdin:
        said = json.loads(line)
        if said.get("lose"):
            lose(engine.worker._worker._store)
            answer()
        else:
            answer(**msgspec.to_builtins(engine.ask(said["ask"])))
    engine.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
