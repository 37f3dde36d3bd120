"""Encoder outputs between engines of real vLLM: the same answers as without, nothing encoded twice, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.vllm.encoder_engine import CONNECTOR
from shmring import threads
from tests.segments import segments_of
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(sys.prefix) / "models" / "416"
SOURCES = Path(sys.prefix) / "sources"  # of other versions of vLLM
VERSIONS = sorted(path.name for path in SOURCES.iterdir())


class Engine:
    """One engine of vLLM, in a process of its own."""

    def __init__(self, log: Path, role: str | None, extra: dict[str, Any], version: str = "", **options: Any) -> None:
        transfer = None if role is None else CONNECTOR | {"ec_connector_extra_config": extra, "ec_role": role}
        said = {"model": str(MODEL), "transfer": transfer, "options": options}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHMRING_VLLM")}
        if version:
            said |= {"compiled": str(next((Path(sys.prefix) / "lib").glob("python*/site-packages/vllm")))}
            # vLLM takes its platform from the version of the distribution of this name.
            information = log.parent / f"vllm-{version}+cpu.dist-info"
            information.mkdir(exist_ok=True)
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
            environment |= {"PYTHONPATH": os.pathsep.join([str(log.parent), str(SOURCES / version), str(ROOT)])}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.encoders", json.dumps(said)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lines: list[str] = []
        self.is_ready = False

    def answer(self) -> Any:
        """The next line that is an answer; the others are vLLM's log."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, text = line.partition(" ")
            if word == "answer":
                return json.loads(text)
            self.lines.append(line)
        raise AssertionError(f"it has ended: {''.join(self.lines)[-2000:]}\n{self.log.read_text()[-4000:]}")

    def say(self, **words: Any) -> Any:
        if not self.is_ready:
            assert self.answer() == {"ready": True}
            self.is_ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def ask(self, *requests: list[int]) -> tuple[Any, int]:
        """The answers, and how many media were encoded for them."""
        said = self.say(ask=[*requests])
        return said["answers"], said["encoded"]

    def end(self) -> str:
        """Ends it in good order; returns what it has logged."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.lines += self.process.stdout
        assert self.process.wait(600) == 0
        return "".join(self.lines) + self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def extra(runtime_directory: Path) -> dict[str, Any]:
    return {"store": "encoders", "socket_dir": str(runtime_directory)}


@pytest.fixture(scope="module")
def start(runtime_directory: Path, extra: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    """``start("ec_producer")``: it starts while others do."""
    engines: list[Engine] = []

    def start(role: str | None, **options: Any) -> Engine:
        engines.append(Engine(runtime_directory / f"log-{len(engines)}", role, extra, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


def serve(extra: dict[str, Any]) -> threads.Ring:
    return threads.serve(
        extra["store"], slab_nbytes="64MiB", kept_nbytes="48MiB", reply_nbytes="64KiB", socket_dir=extra["socket_dir"]
    )


@pytest.fixture(scope="module")
def alone(start: Callable[..., Engine]) -> Engine:
    return start(None)


@pytest.fixture(scope="module")
def consumers(start: Callable[..., Engine]) -> list[Engine]:
    return [start("ec_consumer") for _ in range(2)]


def test_two_engines_use_what_a_third_has_encoded_and_was_killed(
    start: Callable[..., Engine], alone: Engine, consumers: list[Engine], extra: dict[str, Any]
) -> None:
    requests = [[0], [1, 2], [3], [0, 3]]
    with serve(extra) as ring:
        encoder = start("ec_producer")
        _, encoded = encoder.ask(*requests)
        assert encoded == 4
        until(lambda: ring.statistics().kept == 4)
        encoder.kill()
        expected, _ = alone.ask(*requests)
        for consumer in consumers:
            assert consumer.ask(*requests) == (expected, 0)
        answers, encoded = consumers[0].ask([4], [0])
        assert (answers, encoded) == (alone.ask([4], [0])[0], 1), "what nobody has encoded is encoded here"
        assert ring.statistics().protocol_errors == 0
    assert segments_of(extra["store"]) == []


def test_when_the_store_has_gone_encoding_is_as_without_it_and_the_next_one_is_used(
    start: Callable[..., Engine], alone: Engine, consumers: list[Engine], extra: dict[str, Any]
) -> None:
    both = start("ec_both")
    with serve(extra) as ring:
        assert both.ask([10]) == (alone.ask([10])[0], 1)
        until(lambda: ring.statistics().kept == 1)
    assert both.ask([11], [10]) == (alone.ask([11], [10])[0], 1), "its own cache has the other"
    assert consumers[1].ask([10]) == (alone.ask([10])[0], 1)
    with serve(extra) as ring:
        until(lambda: ring.statistics().clients == 6)  # a scheduler and a worker of each engine
        assert both.ask([12])[1] == 1
        until(lambda: ring.statistics().kept == 1)
        assert consumers[1].ask([12]) == (alone.ask([12])[0], 0)
        assert both.ask([11])[1] == 0
        until(lambda: ring.statistics().kept == 2)  # a request came with it, so it is kept again
        assert consumers[1].ask([11]) == (alone.ask([11])[0], 0)
    said = both.end()
    assert said.count("encoders work as without it") <= 6  # of two halves: before the first, and behind each
    assert "shmring: encoder outputs (encoders): " in said


def test_what_is_lost_between_the_look_up_and_the_load_is_encoded(
    start: Callable[..., Engine], alone: Engine, consumers: list[Engine], extra: dict[str, Any]
) -> None:
    with serve(extra) as ring:
        encoder = start("ec_producer")
        encoder.ask([20], [21])
        until(lambda: ring.statistics().kept == 2)
        expected, _ = alone.ask([20, 21])
        until(lambda: ring.statistics().clients == 5)  # the scheduler of an engine that only encodes asks for nothing
        assert consumers[0].say(lose=0) == {}
        assert consumers[0].ask([20, 21]) == (expected, 2)
        assert consumers[1].ask([20, 21]) == (expected, 0)


def test_workers_that_encode_together_all_encode_what_one_of_them_has_lost(
    start: Callable[..., Engine], extra: dict[str, Any]
) -> None:
    """If one did it alone, it would wait for the other one for ever."""
    with serve(extra) as ring:
        encoder, two = start("ec_producer"), start("ec_consumer", tensor_parallel_size=2)
        encoder.ask([25], [26])
        until(lambda: ring.statistics().kept == 2)
        two.say(lose=1)
        (answer,), _ = two.ask([25])
        assert len(answer) == 4, "a token after another"
        two.ask([26])
        assert two.say(count="loaded") == {"counts": [1, 1]}
        assert two.say(count="encoded after all") == {"counts": [1, 1]}


def test_where_media_are_counted_vllm_does_not_start_and_says_what_to_do(start: Callable[..., Engine]) -> None:
    engine = start("ec_consumer", mm_processor_cache_gb=0)
    with pytest.raises(AssertionError, match="--mm-processor-cache-gb above 0"):
        engine.answer()


@pytest.mark.parametrize("version", VERSIONS)
def test_another_vllm_beside_these_compiled_parts_uses_what_it_has_encoded_and_nothing_of_this_one(
    start: Callable[..., Engine], alone: Engine, extra: dict[str, Any], version: str
) -> None:
    expected, _ = alone.ask([30], [31])
    with serve(extra) as ring:
        this, both, consumer = start("ec_both"), start("ec_both", version=version), start("ec_consumer", version=version)
        assert this.ask([30], [31]) == (expected, 2)
        assert both.ask([30], [31])[1] == 2, "outputs of another version may be laid out in another way"
        until(lambda: ring.statistics().kept == 4)
        assert consumer.ask([30], [31]) == (both.ask([30], [31])[0], 0)


CONTRACT = """
import inspect, pickle, vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.v1.core.sched.output import SchedulerOutput
from shmring.integrations.vllm.ec_connector import Message, ShmringECConnector
from shmring.integrations.vllm.encoder_scheduler import Load, Step
print(vllm.__file__)
ours = {name: each for name, each in vars(ShmringECConnector).items() if not name.startswith("_")}
print(ShmringECConnector.__abstractmethods__, [name for name in ours if not hasattr(ECConnectorBase, name)])
for name, each in ours.items():
    theirs, mine = (list(inspect.signature(method).parameters) for method in (getattr(ECConnectorBase, name), each))
    assert mine == theirs or mine[-1] in ("arguments", "_"), (name, theirs, mine)
output = SchedulerOutput.make_empty()
output.scheduled_encoder_inputs = encoded = {"r": [0]}
output.ec_connector_metadata = Message(Step(3, [Load("a", "r", 1, 16, True)], encoded=encoded))
came = pickle.loads(pickle.dumps((output, "arguments"), protocol=pickle.HIGHEST_PROTOCOL))[0]
print(came.ec_connector_metadata.step.encoded is came.scheduled_encoder_inputs)
"""


@pytest.mark.parametrize("version", ["installed", *VERSIONS])
def test_vllm_is_as_the_connector_needs_it(version: str) -> None:
    """It has what is overridden. And it pickles its message whole, so that what is one dict in it is one dict in a worker."""
    paths = [str(ROOT), *([] if version == "installed" else [str(SOURCES / version)])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", CONTRACT], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, overridden, is_one = done.stdout.splitlines()[-3:]
    assert file.startswith(str(Path(sys.prefix) / ("lib" if version == "installed" else f"sources/{version}")))
    assert (overridden, is_one) == ("frozenset() []", "True")
