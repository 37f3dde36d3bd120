"""Embeddings by the ``transformers`` executor: the hidden states of transformers itself, some inputs a step, beside answers."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors import embedding, encoding, preparing
from shmring.engine.executors.interface import ContextLengthError, ExecutorOptions, StepInput, StepOutput
from shmring.engine.protocol import EncodeReply, EncodeRequest, GenerateReply, GenerateRequest, Picture, Text, Waveform
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402 - after the skip
from tests.engine.asking import SEEING, Reference, ask, clip, damaged, noise  # noqa: E402

MANY = 50
Load = Callable[..., TransformersExecutor]


def question(picture: Picture, max_tokens: int) -> GenerateRequest:
    return ask(picture, "What is it?", max_tokens=max_tokens, ignore_eos=True)


def run(executor: TransformersExecutor, requests: Mapping[int, EncodeRequest]) -> dict[int, Any]:
    """Executes steps until all are over, as the engine does; returns their replies, or errors."""
    answers: dict[int, Any] = {}
    while running := {number: request for number, request in requests.items() if number not in answers}:
        outputs = executor.execute([StepInput(number, request) for number, request in running.items()])
        for number, output in zip(running, outputs, strict=True):
            if isinstance(output, Exception):
                answers[number] = output
            elif output.finished:
                answers[number] = output.reply
            else:
                assert (output.reply, output.keep_inputs) == (None, True)
    return answers


def encode(executor: TransformersExecutor, *inputs: Any) -> EncodeReply:
    reply = run(executor, {1: EncodeRequest(list(inputs))})[1]
    if isinstance(reply, Exception):
        raise reply
    assert isinstance(reply, EncodeReply)
    return reply


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=0)


@pytest.fixture
def executor(load: Load) -> TransformersExecutor:
    return load("llava")


# -- the same vectors as by hand ------------------------------------------------------------------------------------------


def test_a_text_and_its_tokens_have_one_embedding(load: Load) -> None:
    executor = load("llama")
    tokens = executor._prompts.build_single(Text("Hello there"))["input_ids"][0].tolist()
    by_text, by_tokens = (encode(executor, Text(text)) for text in ("Hello there", tokens))
    torch.testing.assert_close(by_tokens.embeddings, by_text.embeddings)
    assert by_tokens.prompt_tokens == by_text.prompt_tokens == len(tokens)


@for_each("tokens", [[1 << 30], [-1], []])
def test_tokens_that_a_model_does_not_have_are_refused(load: Load, tokens: list[int]) -> None:
    with pytest.raises(ValueError):
        encode(load("llama"), Text(tokens))


@for_each("architecture", SEEING)
def test_tokens_of_media_without_media_are_only_tokens(architecture: str, load: Load) -> None:
    """Nobody but their caller has something of it; what can't be read so is the caller's fault."""
    executor = load(architecture)
    config = executor._checkpoint.model.config
    tokens = [getattr(config, name, None) for name in ("image_token_id", "video_token_id", "vision_start_token_id")]
    with suppress(ValueError):
        encode(executor, Text([token for token in tokens if token is not None] * 2))
    assert len(encode(executor, Text("Hello")).embeddings) == 1


@for_each("pooling", ["last", "mean"])
@for_each("architecture", ["llama", *SEEING])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(
    architecture: str, pooling: str, load: Load, reference: Callable[[str], Reference]
) -> None:
    executor = load(architecture, **({} if pooling == "last" else {"pooling": pooling}))
    inputs: list[Any] = [Text("Hello there"), Text("日本 🙂")]
    if architecture != "llama":
        inputs += [noise(), noise(90, 40, 1), noise(seed=2)]
    if architecture == "qwen2_vl":
        inputs.append(clip())
    reply = encode(executor, *inputs)
    states = [reference(architecture).states(item) for item in inputs]
    expected = torch.stack([unit(state[-1] if pooling == "last" else state.mean(dim=0)) for state in states])
    assert reply.embeddings.dtype == torch.float32
    torch.testing.assert_close(reply.embeddings, expected, rtol=1e-5, atol=1e-6)
    assert reply.prompt_tokens == sum(len(state) for state in states)
    torch.testing.assert_close(reply.embeddings.norm(dim=1), torch.ones(len(inputs)))
    similarity = reply.embeddings @ reply.embeddings.T - torch.eye(len(inputs))
    assert similarity.max() < 0.999, "different inputs have different embeddings"


def test_equal_pictures_get_equal_bits_whatever_is_beside_them(executor: TransformersExecutor) -> None:
    alone = encode(executor, noise()).embeddings
    assert torch.equal(encode(executor, noise()).embeddings, alone)
    among = encode(executor, Text("Hello"), noise(seed=1), noise(), noise()).embeddings
    assert torch.equal(among[2:], alone.expand(2, -1))


@for_each("architecture", ["llama", *SEEING])
def test_texts_of_one_pass_get_the_embeddings_that_they_get_alone(architecture: str, load: Load) -> None:
    executor = load(architecture)
    texts = [Text("word " * length) for length in (1, 10, 3, 30, 1, 2)]
    requests = {1: EncodeRequest([*texts[:4]]), 2: EncodeRequest([texts[4]]), 3: EncodeRequest([texts[5]])}
    outputs: Sequence[Any] = executor.execute([StepInput(number, request) for number, request in requests.items()])
    for number, output in zip(requests, outputs, strict=True):
        executor.forget(number)
        assert output.finished is (executor._model.flat or number == 2), "a pass has room for all, or for one"
        if output.finished:
            alone = torch.cat([encode(executor, text).embeddings for text in requests[number].inputs])
            torch.testing.assert_close(output.reply.embeddings, alone, rtol=0, atol=1e-5)


def test_an_embedding_of_other_numbers_than_float32_is_float32_and_of_length_one(
    load: Load,
) -> None:
    for pooling in ("last", "mean"):
        embeddings = encode(load("llava", dtype="bfloat16", pooling=pooling), noise(), Text("Hello there")).embeddings
        assert embeddings.dtype == torch.float32
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))


def test_a_text_gets_the_tokens_that_the_tokenizer_adds_at_its_ends(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "with-beginning"
    shutil.copytree(tiny_model("llama"), path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    processors = pytest.importorskip("tokenizers.processors")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(path)
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    assert executor._prompts.build_single(Text("Hi"))["input_ids"][0, 0] == tokenizer.pad_token_id
    reply = encode(executor, Text("Hello there"))
    plain = encode(TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama")))), Text("Hello there"))
    assert reply.prompt_tokens == plain.prompt_tokens + 1
    torch.testing.assert_close(reply.embeddings[0], unit(Reference(path).states(Text("Hello there"))[-1]))


@pytest.mark.parametrize("architecture", ["llava", "idefics3"])
def test_control_tokens_in_a_text_to_be_embedded_are_text(architecture: str, load: Load) -> None:
    executor = load(architecture)
    tokens = executor._prompts.build_single(Text("an <image> of mine<|end|>"))["input_ids"][0].tolist()
    tokenizer = executor._checkpoint.tokenizer
    assert not {tokenizer.convert_tokens_to_ids("<image>"), tokenizer.eos_token_id} & set(tokens)
    assert tokenizer.decode(tokens) == "an <image> of mine<|end|>"


@for_each("architecture", SEEING)
def test_without_a_chat_template_a_medium_is_its_place(architecture: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(architecture, chat_template=False)
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    description = executor.describe()
    assert "generate" not in description.tasks
    assert description.input.picture is not None
    first, second = encode(executor, noise()), encode(executor, noise(seed=1))
    reference = Reference(path)
    inputs = reference.processor(text=[reference.processor.image_token], images=[noise().pixels], return_tensors="pt")
    with torch.inference_mode():
        states = reference.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(first.embeddings[0], unit(states[-1]).clone(), rtol=1e-5, atol=1e-6)
    assert first.prompt_tokens == len(states)
    assert (first.embeddings @ second.embeddings.T).item() < 0.999
    if architecture == "qwen2_vl":
        assert description.input.video is not None
        torch.testing.assert_close(encode(executor, clip()).embeddings.norm(), torch.tensor(1.0))


# -- steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("starves", "expected_order"), [(False, "deabc"), (True, "abcde")])
def test_a_step_embeds_what_a_pass_takes_and_requests_take_turns(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, starves: bool, expected_order: str
) -> None:
    monkeypatch.setattr(encoding, "_STARVING_S", -1.0 if starves else 60.0)
    monkeypatch.setattr(embedding, "_PASS_TOKENS", 1)  # one input, however long
    requests = {number: EncodeRequest([Text(name) for name in names]) for number, names in enumerate(("abc", "d", "e"), 1)}
    expected = {number: encode(executor, *request.inputs).embeddings for number, request in requests.items()}
    order: list[str] = []
    embedder: Any = executor._embedder
    embed = embedder.embed

    def note(items: Sequence[Text]) -> Any:
        results = embed(items)
        order.extend(item.text for item, _ in zip(items, results, strict=False))
        return results

    monkeypatch.setattr(embedder, "embed", note)
    execute = executor.execute

    def step(batch: Any) -> Any:
        before = len(order)
        outputs = execute(batch)
        assert len(order) == before + 1
        return outputs

    monkeypatch.setattr(executor, "execute", step)
    replies = run(executor, requests)
    assert order == [*expected_order]
    assert all(torch.equal(replies[number].embeddings, expected[number]) for number in requests)
    assert executor._line._progress == {}


def test_answers_go_on_a_token_a_step_beside_what_is_embedded(executor: TransformersExecutor) -> None:
    expected = encode(executor, Text("a"), noise(), Text("b")).embeddings
    payload: GenerateRequest | None = question(noise(seed=4), 5)
    request = EncodeRequest([Text("a"), noise(), Text("b")])
    while 2 not in executor._answers:  # its picture is looked at beside steps
        executor.execute([StepInput(2, payload)])
        payload = None
    for step in range(1, 5):
        outputs: Sequence[Any] = executor.execute([StepInput(1, request)] * (step < 4) + [StepInput(2, None)])
        assert outputs[-1].finished == (step == 4)
        if step == 3:
            assert torch.equal(outputs[0].reply.embeddings, expected)
    answered = outputs[-1]
    assert isinstance(answered.reply, GenerateReply)
    assert answered.reply.completion_tokens == 5


@for_each(
    ("item", "message"),
    [
        (Text(""), "can't be empty"),
        (Text("Hi " * 600), r"the prompt has \d{3,4} tokens, media included; the model takes 512"),
        (Picture(torch.zeros(8, 8, dtype=torch.uint8)), r"uint8 of shape \(height, width, 3\)"),
        (Picture(torch.zeros(8, 8, 3)), "got torch.float32"),
        (clip(), "takes no video"),
        (Waveform(torch.zeros(99), 16_000), "takes no waveform"),
    ],
)
def test_an_input_at_fault_fails_its_request_alone(executor: TransformersExecutor, item: Any, message: str) -> None:
    requests = {1: EncodeRequest([Text("a")]), 2: EncodeRequest([Text("b"), item]), 3: EncodeRequest([Text("c")])}
    replies = run(executor, requests)
    with pytest.raises(ValueError, match=message):
        raise replies[2]
    for number, text in ((1, "a"), (3, "c")):
        torch.testing.assert_close(replies[number].embeddings, encode(executor, Text(text)).embeddings, rtol=0, atol=1e-5)
    assert executor._line._progress == {}


def test_an_input_as_long_as_the_model_takes_is_embedded_and_no_longer_one(load: Load) -> None:
    executor = load("llama")
    tokens = encode(executor, Text("Hi " * 20)).prompt_tokens
    assert encode(load("llama", max_model_len=tokens), Text("Hi " * 20)).prompt_tokens == tokens
    for architecture, length, item in (("llama", tokens - 1, Text("Hi " * 20)), ("llava", 8, noise())):
        with pytest.raises(ValueError, match=rf"the prompt has \d+ tokens, media included; the model takes {length}"):
            encode(load(architecture, max_model_len=length), item)


@for_each("damage", [float("nan"), 0.0])
def test_hidden_states_that_are_no_numbers_fail_the_request(damage: float, executor: TransformersExecutor) -> None:
    weights, message = executor._checkpoint.model.model.language_model.norm.weight, "NaN or infinity, or nothing but noughts"
    with damaged(weights, damage), pytest.raises(RuntimeError, match=message):
        encode(executor, Text("Hi"))


@for_each("architecture", ["llava", "idefics3", "qwen2_vl"])
def test_pixels_are_let_go_after_each_step(architecture: str, load: Load) -> None:
    executor = load(architecture)
    first, second = noise(), noise(seed=1)
    views = [weakref.ref(first.pixels), weakref.ref(second.pixels)]
    request = EncodeRequest([first, second])
    del first, second
    (output,) = executor.execute([StepInput(1, request)])
    assert isinstance(output, StepOutput)
    assert output.keep_inputs
    del request
    gc.collect()
    assert [view() for view in views] == [None, None], "the engine keeps the inputs, and not the executor"
    executor.forget(1)
    assert executor._line._progress == {}


def test_pixels_are_let_go_when_embedding_fails(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(executor._checkpoint.model.model, "forward", fail)
    picture = noise()
    view = weakref.ref(picture.pixels)
    (output,) = executor.execute([StepInput(1, EncodeRequest([picture]))])
    del picture
    gc.collect()
    assert isinstance(output, RuntimeError)
    assert "out of memory (no room)" in str(output)
    assert view() is None


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_no_keys_and_values_are_made(architecture: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load(architecture)
    inputs = [Text("Hello")] if architecture == "llama" else [noise(), Text("Hello")]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a cache is filled")

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", refuse)
    encode(executor, *inputs)
    assert getattr(executor._checkpoint.model.model, "rope_deltas", None) is None


def test_a_model_without_a_backbone_answers_and_does_not_embed(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "base_model_prefix", "")
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama"))))
    description = executor.describe()
    assert "encode" not in description.tasks
    assert (description.embedding_size, description.input.text) == (None, False)
    with pytest.raises(ValueError, match="it does not embed"):
        encode(executor, Text("Hi"))


# -- in the engine, through slots -----------------------------------------------------------------------------------------


@asynccontextmanager
async def engine_and_client(executor: TransformersExecutor, socket_dir: Path) -> AsyncIterator[tuple[EngineCore, EngineClient]]:
    """A slab that holds a third of the pictures, so that the others wait for what is embedded."""
    core = await EngineCore.create("core", executor, slab_nbytes="1MiB", socket_dir=str(socket_dir))
    async with core:
        running = asyncio.create_task(core.run())
        async with await EngineClient.connect("core", socket_dir=str(socket_dir)) as client:
            yield core, client
    await running


async def encode_in_slot(client: EngineClient, pictures: Sequence[Picture]) -> torch.Tensor:
    async with client.ring.slot(sum(picture.pixels.nbytes + 64 for picture in pictures)) as slot:
        views = []
        for picture in pictures:
            views.append(Picture(slot.tensor(tuple(picture.pixels.shape), torch.uint8)))
            views[-1].pixels.copy_(picture.pixels)
        outputs = [output async for output in client.encode(EncodeRequest(list(views)))]
        views.clear()
    return outputs[0].embeddings


@pytest.mark.parametrize("answer_first", [True, False], ids=["answer-first", "embeddings-first"])
async def test_an_answer_streams_while_many_pictures_are_embedded(
    answer_first: bool, executor: TransformersExecutor, socket_dir: Path
) -> None:
    pictures = [noise(140, 150, seed) for seed in range(MANY)]
    expected = torch.cat([encode(executor, picture).embeddings for picture in pictures])
    chat = question(noise(140, 150, 99), 20)
    embedded: list[int] = []
    pieces: list[tuple[str, int]] = []  # and how many embeddings there were then

    async with asyncio.timeout(60), engine_and_client(executor, socket_dir) as (core, client):

        async def embed(index: int) -> torch.Tensor:
            embeddings = await encode_in_slot(client, [pictures[index]])
            embedded.append(index)
            return embeddings

        async def listen() -> None:
            async for output in client.generate(chat):
                note = (output.text, len(embedded))
                pieces.append(note)

        alone = "".join([output.text async for output in client.generate(chat)])
        tasks: list[asyncio.Task[Any]] = []
        if answer_first:
            tasks.append(asyncio.create_task(listen()))
            while not pieces:
                await asyncio.sleep(0)
        tasks += [asyncio.create_task(embed(index)) for index in range(MANY)]
        if not answer_first:
            while not embedded:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(listen()))
        results = await asyncio.gather(*tasks)
        assert core.metrics.failed_requests == 0
        assert client.ring.statistics().copies == 2, "of the questions' pictures, and of no other"
    assert "".join(text for text, _ in pieces) == alone
    embeddings = torch.cat([result for result in results if result is not None])
    assert torch.equal(embeddings, expected)
    # A token for each embedding, or more: 20 tokens pass while 20 pictures are embedded, not all fifty of them.
    first, last = pieces[0][1], pieces[-1][1]
    assert last - first <= 20 + 2
    if answer_first:
        assert last < MANY / 2 + 2


async def test_a_long_batch_holds_its_slot_and_lets_others_through(
    executor: TransformersExecutor, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [noise(60, 70, seed) for seed in range(40)]
    both_came, execute = threading.Event(), executor.execute

    def wait(batch: Sequence[StepInput]) -> Any:
        assert both_came.wait(60)
        return execute(batch)

    monkeypatch.setattr(executor, "execute", wait)
    async with asyncio.timeout(60), engine_and_client(executor, socket_dir) as (core, client):
        batch = asyncio.create_task(encode_in_slot(client, pictures))
        while core._busy is None:
            await asyncio.sleep(0)
        other = asyncio.create_task(encode_in_slot(client, [pictures[7]]))
        while len(core._scheduler.all()) < 2:
            await asyncio.sleep(0)
        both_came.set()
        single = await other
        assert not batch.done(), "requests take turns"
        assert core.ring.statistics().slots_in_use == 1
        embeddings = await batch
    assert torch.equal(embeddings[7:8], single)
    monkeypatch.undo()
    assert torch.equal(embeddings, encode(executor, *pictures).embeddings)


async def test_a_batch_that_is_given_up_leaves_between_two_inputs(executor: TransformersExecutor, socket_dir: Path) -> None:
    async with asyncio.timeout(60), engine_and_client(executor, socket_dir) as (core, client):
        batch = asyncio.create_task(encode_in_slot(client, [noise(60, 70, seed) for seed in range(70)]))
        while core.metrics.steps < 2:
            await asyncio.sleep(0)
        batch.cancel()
        while core.ring.statistics().slots_in_use or executor._line._progress:
            await asyncio.sleep(0)
        assert core.metrics.steps < 70
        assert core.metrics.finished_requests == 0


def test_long_texts_are_made_into_tokens_beside_steps(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load("llava")
    inputs = [Text("Hello there, " * 9), noise(), Text("Hi"), Text("Another one. " * 9)]
    expected = encode(executor, *inputs)
    monkeypatch.setattr(preparing, "_LONG_CHARACTERS", 100)
    go_on = threading.Event()
    read_text = executor._prompts_of["texts"].read_text
    threads: list[str] = []

    def wait(text: Text) -> Text:
        threads.append(threading.current_thread().name)
        assert go_on.wait(60)
        return read_text(text)

    monkeypatch.setattr(executor._prompts_of["texts"], "read_text", wait)
    request = EncodeRequest([*inputs])
    short = encode(executor, Text("Hi"))
    outputs = executor.execute([StepInput(2, request), StepInput(3, EncodeRequest([Text("Hi")]))])
    assert outputs[0] == StepOutput(None, finished=False, keep_inputs=True)
    assert torch.equal(outputs[1].reply.embeddings, short.embeddings)  # type: ignore[union-attr]
    executor.forget(3)
    go_on.set()
    reply = run(executor, {2: request})[2]
    torch.testing.assert_close(reply.embeddings, expected.embeddings)
    assert reply.prompt_tokens == expected.prompt_tokens
    assert {name.rpartition("_")[0] for name in threads} == {"shmring-texts"}
    assert request.inputs == inputs, "the request is not changed"
    with pytest.raises(ContextLengthError):
        encode(executor, Text("word " * 5000), Text("Hi"))
    executor.execute([StepInput(4, request)])
    executor.forget(4)
    assert executor._long_texts == {}


def test_long_texts_of_several_requests_are_made_into_tokens_in_turn(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load("llava")
    monkeypatch.setattr(preparing, "_LONG_CHARACTERS", 100)
    read_text = executor._prompts_of["texts"].read_text
    read: list[str] = []

    def note(text: Text) -> Text:
        assert isinstance(text.text, str)
        read.append(text.text[:4])
        return read_text(text)

    monkeypatch.setattr(executor._prompts_of["texts"], "read_text", note)
    many, one = EncodeRequest([Text("many " * 30)] * 12), EncodeRequest([Text("one, " * 30)])
    run(executor, {1: many, 2: one})
    text = executor._prompts.read_text(one.inputs[0])  # type: ignore[arg-type]
    assert sys.getsizeof(text.text) < 6 * len(text.text) + 100, "tokens take no more memory than their text"
    assert read.index("one,") <= 1, "it does not wait for all texts of the other request"
    assert len(read) == 13


def test_the_long_texts_of_a_request_that_was_given_up_are_made_into_tokens_no_more(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load("llava")
    monkeypatch.setattr(preparing, "_LONG_CHARACTERS", 100)
    go_on = threading.Event()
    read: list[Text] = []

    def wait(text: Text) -> Text:
        read.append(text)
        assert go_on.wait(60)
        return Text([1])

    monkeypatch.setattr(executor._prompts_of["texts"], "read_text", wait)
    executor.execute([StepInput(1, EncodeRequest([Text("many " * 30)] * 12))])
    executor.forget(1)
    go_on.set()
    executor._preparing.threads["texts"].submit("", lambda: None).result(60)
    assert len(read) <= 1
