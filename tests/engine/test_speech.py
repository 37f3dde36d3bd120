"""Speech in text: a Whisper model writes of a window what transformers itself has it write, and windows follow each other where
sentences end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions, StepInput
from shmring.engine.protocol import (
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    Picture,
    SamplingParams,
    SpeechParams,
    SpeechSegment,
    Text,
    Waveform,
)
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from transformers.generation import logits_process  # noqa: E402

from shmring.engine.executors.speech import SpeechExecutor  # noqa: E402

RATE = 16_000


@pytest.fixture(scope="module")
def reference(whisper: Path) -> tuple[Any, Any]:
    """The model and its processor, as transformers loads them."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper, local_files_only=True)
    return model.eval(), transformers.WhisperProcessor.from_pretrained(whisper, local_files_only=True)


def sound(seconds: float) -> torch.Tensor:
    times = torch.arange(round(RATE * seconds)) / RATE
    return 0.3 * torch.sin(2 * torch.pi * 440 * times * (1 + 0.3 * torch.sin(times)))


def ask(
    seconds: float = 3.0, *, prompt: str | None = None, temperature: float = 0.0, seed: int | None = None, **speech: Any
) -> Any:
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return GenerateRequest(
        media=[Waveform(sound(seconds), RATE)], sampling=sampling, prompt=prompt, speech=SpeechParams(**speech)
    )


def hear(speech_executor: SpeechExecutor, request: Any, request_id: int = 1) -> list[GenerateReply]:
    payload, replies = request, []
    for _ in range(5000):
        [output] = speech_executor.execute([StepInput(request_id, payload)])
        payload = None
        if isinstance(output, Exception):
            raise output
        if output.reply is not None:
            assert isinstance(output.reply, GenerateReply)
            replies.append(output.reply)
        if output.finished:
            return replies
    raise AssertionError("it does not end")


def segments_of(replies: Sequence[GenerateReply]) -> list[SpeechSegment]:
    return [segment for reply in replies for segment in reply.segments]


def test_it_says_what_it_does(speech_executor: SpeechExecutor) -> None:
    description = speech_executor.describe()
    assert (description.tasks, description.model) == (["transcribe", "translate"], "tiny-whisper")
    assert description.input.sound is not None
    assert (description.input.sound.form, description.input.sound.sample_rate) == ("waveform", RATE)


@for_each("task", ["transcribe", "translate"])
@for_each("language", ["en", "German"])
def test_a_window_is_written_as_transformers_writes_it(
    speech_executor: SpeechExecutor, reference: tuple[Any, Any], task: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = reference
    chosen: list[int] = []
    choose = speech_executor._next_token

    def note(*arguments: Any) -> tuple[int, float]:
        token, logprob = choose(*arguments)
        chosen.append(token)
        return token, logprob

    monkeypatch.setattr(speech_executor, "_next_token", note)
    request = ask(30.0, task=task, language=language)
    speech_executor.execute([StepInput(9, request)])
    window = speech_executor._transcripts[9].window
    while window is not None and speech_executor._transcripts[9].window is window:
        speech_executor.execute([StepInput(9, None)])
        if 9 not in speech_executor._transcripts:
            break
    speech_executor.forget(9)
    features = processor(request.media[0].samples.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    code = {"en": "en", "German": "de"}[language]
    names = ["<|startoftranscript|>", f"<|{code}|>", f"<|{task}|>"]
    before = processor.tokenizer.convert_tokens_to_ids(names)
    config = model.generation_config
    processors = [
        logits_process.SuppressTokensLogitsProcessor(config.suppress_tokens),
        logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=len(before)),
    ]
    [tokens] = transformers.GenerationMixin.generate(
        model,
        features,
        decoder_input_ids=torch.tensor([before]),
        logits_processor=transformers.LogitsProcessorList(processors),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=32, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=False
        ),
    ).tolist()
    assert chosen == tokens[len(before) :]
    assert len(chosen) > 5


def test_the_language_is_found_out(speech_executor: SpeechExecutor, reference: tuple[Any, Any]) -> None:
    model, processor = reference
    features = processor(sound(3.0).numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    found = processor.tokenizer.decode(model.detect_language(features))
    names = {"<|en|>": "english", "<|de|>": "german"}
    replies = hear(speech_executor, ask())
    assert {reply.language for reply in replies} == {names[found]}
    code = found[2:-2]
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in hear(speech_executor, ask(language=code))]


def test_a_long_recording_is_heard_to_its_end(speech_executor: SpeechExecutor) -> None:
    replies = hear(speech_executor, ask(75.0, language="en"))
    assert [reply.finish_reason for reply in replies] == [None] * (len(replies) - 1) + ["stop"]
    segments = segments_of(replies)
    assert len({segment.window_s for segment in segments}) >= 3
    times = [time for segment in segments for time in (segment.start_s, segment.end_s)]
    assert times == sorted(times)
    assert times[-1] <= 75.0
    assert "".join(segment.text for segment in segments) == "".join(reply.text for reply in replies)
    counts = [reply.completion_tokens for reply in replies]
    assert counts == sorted(counts)


# -- windows ------------------------------------------------------------------------------------------------------------------


def write(
    speech_executor: SpeechExecutor, monkeypatch: pytest.MonkeyPatch, seconds: float, *windows: str, no_speech: float = 0.0
) -> Any:
    """What becomes of a recording if the model writes this: words, and times between bars; a dot ends a window."""
    tokenizer = speech_executor._checkpoint.tokenizer
    script = [
        tokenizer.convert_tokens_to_ids(f"<|{float(part):.2f}|>")
        if part[0].isdigit()
        else tokenizer.encode(part, add_special_tokens=False)[0]
        if part != "."
        else tokenizer.eos_token_id
        for window in windows
        for part in window.split()
    ]
    left = iter(script)

    def choose(_: Any, window: Any, __: Any) -> tuple[int, float]:
        window.no_speech = no_speech
        return next(left), -2.0

    monkeypatch.setattr(speech_executor, "_next_token", choose)
    segments = segments_of(hear(speech_executor, ask(seconds, language="en")))
    assert list(left) == []
    return [(segment.start_s, segment.end_s, segment.text) for segment in segments]


@for_each(
    ("seconds", "windows", "expected"),
    [
        # All is said before the window ends.
        (10.0, ["0 a 4 ."], [(0, 4, "a")]),
        (10.0, ["1 a 4 5 b 9.5 ."], [(1, 4, "a"), (5, 9.5, "b")]),
        # A sentence that is cut by the window's end is heard again in the next one, which begins where the last one has ended.
        (40.0, ["0 a 20 25 b .", "0 c 19 ."], [(0, 20, "a"), (20, 39, "c")]),
        (40.0, ["0 a 20 25 .", "0 c 14 ."], [(0, 20, "a"), (25, 39, "c")]),
        # There is no end at all: it is said to be the window's.
        (40.0, ["0 a .", "0 b ."], [(0, 30, "a"), (30, 40, "b")]),
        # Nothing is said.
        (40.0, [".", "0 ."], []),
        # Beyond the recording's end, there is nothing.
        (10.0, ["0 a 20 20 b 25 ."], [(0, 10, "a"), (10, 10, "b")]),
        # A window that would begin where this one does would be the same again.
        (40.0, ["0 a 0 0 b .", "0 c 3 ."], [(0, 0, "a"), (0, 30, "b"), (30, 33, "c")]),
    ],
)
def test_windows_begin_where_sentences_end(
    speech_executor: SpeechExecutor, monkeypatch: pytest.MonkeyPatch, seconds: float, windows: list[str], expected: Any
) -> None:
    written = write(speech_executor, monkeypatch, seconds, *windows)
    assert [(pytest.approx(start), pytest.approx(end), text) for start, end, text in written] == expected


def test_of_silence_nothing_is_written(speech_executor: SpeechExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the model is sure of what it wrote."""
    assert write(speech_executor, monkeypatch, 40.0, "0 a 20 .", "0 a 9 .", no_speech=0.7) == []
    monkeypatch.setattr("shmring.engine.executors.speech_windows._LEAST_LOGPROB", -3.0)
    assert len(write(speech_executor, monkeypatch, 40.0, "0 a 20 .", "0 a 9 .", no_speech=0.7)) == 2


# -- steps --------------------------------------------------------------------------------------------------------------------


def test_a_step_takes_each_request_a_token_further(speech_executor: SpeechExecutor) -> None:
    """So a short recording need not wait for a long one, and both are written as they are alone."""
    alone = [hear(speech_executor, ask(seconds, language="en")) for seconds in (3.0, 65.0)]
    speech_executor.execute([StepInput(2, ask(65.0, language="en"))])
    payload, together, ended = ask(3.0, language="en"), {1: [], 2: []}, []  # type: ignore[var-annotated]
    while len(ended) < 2:
        running = [number for number in (1, 2) if number not in ended]
        outputs = speech_executor.execute([StepInput(number, payload if number == 1 else None) for number in running])
        payload = None
        for number, output in zip(running, outputs, strict=True):
            assert not isinstance(output, Exception)
            assert output.seconds > 0
            if output.reply is not None:
                together[number].append(output.reply)
            if output.finished:
                ended.append(number)
    assert ended == [1, 2]
    assert [segments_of(together[number]) for number in (1, 2)] == [segments_of(replies) for replies in alone]
    assert speech_executor._transcripts == {}


def test_who_is_forgotten_takes_no_memory(speech_executor: SpeechExecutor) -> None:
    speech_executor.execute([StepInput(5, ask(65.0))])
    assert 5 in speech_executor._transcripts
    speech_executor.forget(5)
    speech_executor.forget(6)
    assert speech_executor._transcripts == {}


def test_the_recording_is_not_read_behind_its_first_step(speech_executor: SpeechExecutor) -> None:
    """Its slot goes back then."""
    plain = hear(speech_executor, ask(35.0, language="en"))
    request = ask(35.0, language="en")
    speech_executor.execute([StepInput(1, request)])
    request.media[0].samples.zero_()
    replies = []
    while True:
        [output] = speech_executor.execute([StepInput(1, None)])
        assert not isinstance(output, Exception)
        replies += [output.reply] if output.reply is not None else []
        if output.finished:
            break
    assert segments_of(replies) == segments_of(plain)  # type: ignore[arg-type]


def test_chance_is_repeatable(speech_executor: SpeechExecutor) -> None:
    first, again, other = (
        [reply.token_ids for reply in hear(speech_executor, ask(language="en", temperature=1.0, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first != [reply.token_ids for reply in hear(speech_executor, ask(language="en"))]


def test_what_was_said_before_stands_before_the_first_window(speech_executor: SpeechExecutor) -> None:
    request = ask(language="en", prompt="The boat is red. " * 50)
    speech_executor.execute([StepInput(4, request)])
    window = speech_executor._transcripts[4].window
    assert window is not None, "the first step opens it"
    speech_executor.forget(4)
    text = speech_executor._checkpoint.tokenizer.decode(window.tokens)
    assert text.startswith("<|startofprev|>")
    assert text.endswith("boat is red.<|startoftranscript|><|en|><|transcribe|>")
    assert window.begin == len(window.tokens) == 32 + 3
    assert hear(speech_executor, ask(language="en", prompt="<|endoftext|>")) != []
    begins = []
    speech_executor.execute([StepInput(4, ask(65.0, language="en", prompt="The boat is red."))])
    transcript = speech_executor._transcripts[4]
    while 4 in speech_executor._transcripts:
        if transcript.window is not None and transcript.window.start_s not in [start for start, _ in begins]:
            begins.append((transcript.window.start_s, transcript.window.begin))
        speech_executor.execute([StepInput(4, None)])
    assert len(begins) > 1
    assert [begin for _, begin in begins[1:]] == [3] * (len(begins) - 1)


@for_each(
    ("request_", "complaint"),
    [
        (EncodeRequest([Text("a")]), "and nothing else"),
        (GenerateRequest(prompt="a"), "and nothing else"),
        (GenerateRequest(speech=SpeechParams()), "one recording"),
        (GenerateRequest(media=[Picture(torch.zeros(2, 2, 3, dtype=torch.uint8))], speech=SpeechParams()), "one recording"),
        (GenerateRequest(media=[Waveform(torch.zeros(9), 8000)], speech=SpeechParams()), "16000 Hz"),
        (GenerateRequest(media=[Waveform(torch.zeros(0), RATE)], speech=SpeechParams()), "has samples"),
        (ask(language="xx"), "does not know the language 'xx'"),
        (ask(language="fr"), "does not know the language 'fr'"),
    ],
)
def test_what_it_does_not_do_is_refused(speech_executor: SpeechExecutor, request_: Any, complaint: str) -> None:
    [output] = speech_executor.execute([StepInput(1, request_)])
    assert isinstance(output, ValueError)
    assert complaint in str(output)
    assert speech_executor._transcripts == {}


async def test_a_recording_goes_through_the_slab(speech_executor: SpeechExecutor, socket_dir: Any) -> None:
    request = ask(40.0, language="en")
    alone = segments_of(hear(speech_executor, request))
    options = {"slab_nbytes": "16MiB", "socket_dir": str(socket_dir)}
    async with await EngineCore.create("speech", speech_executor, **options) as core:
        running = asyncio.create_task(core.run())
        async with await EngineClient.connect("speech", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
            assert "transcribe" in (await client.describe()).tasks
            for stream in (True, False):
                request.stream = stream
                replies = [reply async for reply in client.generate(request)]
                assert segments_of(replies) == alone
                assert (replies[-1].finish_reason, replies[-1].language) == ("stop", "english")
    await running


def test_options_are_those_of_the_executor(whisper: Path) -> None:
    with pytest.raises(ValueError, match="has no option 'pool'"):
        create_executor("transformers", ExecutorOptions(model=str(whisper), options={"pool": 1}))
    with pytest.raises(ValueError, match="mm_processor_kwargs"):
        create_executor("transformers", ExecutorOptions(model=str(whisper), mm_processor_kwargs={"a": 1}))
    small = create_executor("transformers", ExecutorOptions(model=str(whisper), options={"max_num_seqs": 3}))
    assert small.describe().max_batch_size == 3
