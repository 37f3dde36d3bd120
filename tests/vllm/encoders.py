"""A program: one engine of vLLM with a connector for encoder outputs, or without; asked by lines.

``python -m tests.vllm.encoders '{"model": DIRECTORY, "transfer": {...}, "options": {...}}'``, as
:class:`bench.vllm.encoder_engine.EncoderEngine` takes them; ``compiled`` is where the compiled parts of vLLM are, for a vLLM of
which only the sources are here. Each line that comes is JSON, and is answered by a line that begins with ``answer``:

* ``{"ask": [[1], [2, 3]]}``: one request with picture 1, another with pictures 2 and 3;
* ``{"lose": 0}``: the next look-up of this worker finds nothing, as when the store ends in that moment;
* ``{"count": "loaded"}``: what each worker has counted of this.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from bench.vllm.encoder_engine import EncoderEngine


def lose(worker: Any, rank: int) -> None:
    """The next look-up of one worker finds nothing."""
    from vllm.distributed.parallel_state import get_tp_group

    store = store_of_this_worker()
    if get_tp_group().rank_in_group != rank:
        return
    find = store.find

    def find_nothing(keys: list[bytes], timeout_s: float) -> list[None]:
        store.find = find
        return [None] * len(keys)

    store.find = find_nothing


def count(worker: Any, what: str) -> int:
    """How often this has happened in a worker."""
    counted: int = store_of_this_worker().counts[what]
    return counted


def store_of_this_worker() -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer

    return get_ec_transfer()._worker._store


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
        if "lose" in said:
            engine.call(lose, said["lose"])
            answer()
        elif "count" in said:
            answer(counts=engine.call(count, said["count"]))
        else:
            answer(**msgspec.to_builtins(engine.ask(said["ask"])))
    engine.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
