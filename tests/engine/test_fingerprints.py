"""The fingerprints executor: one reply or one error for each request, and things of one kind among themselves."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shmring.engine.executors.fingerprints import FingerprintsExecutor
from shmring.engine.executors.interface import Executor, ExecutorOptions, StepInput, StepOutput
from shmring.engine.fingerprints.clips import fingerprint_clip
from shmring.engine.fingerprints.pictures import fingerprint_picture
from shmring.engine.fingerprints.sounds import fingerprint_sound
from shmring.engine.fingerprints.texts import fingerprint_text
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    Features,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    Picture,
    PictureSpec,
    SoundSpec,
    Spectrogram,
    Text,
    TextPart,
    Video,
    VideoSpec,
    Waveform,
)
from tests.tables import for_each

MEDIA = Path(__file__).resolve().parents[2] / "frontend" / "samples"


def random_bytes(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def picture(seed: int = 1) -> Picture:
    return Picture(random_bytes(40, 30, 3, seed=seed))


def sound(seed: int = 1) -> Spectrogram:
    return Spectrogram(torch.randn(120, 80, generator=torch.Generator().manual_seed(seed)), duration_s=1.2)


def clip(seed: int = 1) -> Video:
    return Video(random_bytes(4, 20, 30, 3, seed=seed), timestamps_s=[0.0, 0.5, 1.0, 1.5], duration_s=2.0)


def execute(*requests: EncodeRequest | GenerateRequest) -> list[StepOutput | Exception]:
    """Executes steps until all are answered, as the engine does."""
    executor = FingerprintsExecutor()
    outputs: dict[int, StepOutput | Exception] = {}
    while len(outputs) < len(requests):
        batch = [StepInput(number, request) for number, request in enumerate(requests) if number not in outputs]
        for part, output in zip(batch, executor.execute(batch), strict=True):
            if isinstance(output, Exception) or output.finished:
                outputs[part.request_id] = output
                executor.forget(part.request_id)
            else:
                assert (output.reply, output.keep_inputs) == (None, True)
    return [outputs[number] for number in range(len(requests))]


def embeddings_of(output: StepOutput | Exception) -> torch.Tensor:
    assert isinstance(output, StepOutput)
    assert isinstance(output.reply, EncodeReply)
    return output.reply.embeddings


def test_each_input_of_each_request_is_described_by_its_kind() -> None:
    mixed = EncodeRequest([Text("a text of five words"), picture(), sound(), clip(), picture(2)])
    outputs = execute(mixed, EncodeRequest([picture(3)]), EncodeRequest([Text("one"), Text("two more")]))
    expected = [
        fingerprint_text("a text of five words"),
        fingerprint_picture(picture().pixels),
        fingerprint_sound(sound().log_mel),
        fingerprint_clip(clip().frames, clip().timestamps_s, clip().duration_s),
        fingerprint_picture(picture(2).pixels),
    ]
    assert torch.equal(embeddings_of(outputs[0]), torch.stack(expected))
    assert torch.equal(embeddings_of(outputs[1]), fingerprint_picture(picture(3).pixels).unsqueeze(0))
    assert torch.equal(embeddings_of(outputs[2]), torch.stack([fingerprint_text("one"), fingerprint_text("two more")]))
    for output, words in zip(outputs, [5, 0, 3], strict=True):
        assert isinstance(output, StepOutput)
        assert output.finished
        assert not output.keep_inputs
        assert isinstance(output.reply, EncodeReply)
        assert output.reply.prompt_tokens == words
        assert output.reply.embeddings.dtype == torch.float32
        assert torch.allclose(output.reply.embeddings.norm(dim=1), torch.tensor(1.0))


def test_an_empty_step_has_no_outputs() -> None:
    assert execute() == []


BAD = {
    "float-picture": (EncodeRequest([Picture(torch.zeros(4, 4, 3))]), "expected a picture"),
    "empty-picture": (EncodeRequest([Picture(torch.zeros(0, 4, 3, dtype=torch.uint8))]), "expected a picture"),
    "bands": (EncodeRequest([Spectrogram(torch.zeros(10, 128), 0.1)]), "expected a log-mel spectrogram"),
    "nan": (EncodeRequest([Spectrogram(torch.full((10, 80), torch.nan), 0.1)]), "NaN"),
    "features": (EncodeRequest([Features(torch.zeros(8, dtype=torch.uint8), [])]), "takes pictures as pixels; got features"),
    "waveform": (EncodeRequest([Waveform(torch.zeros(16_000), 16_000)]), "as log-mel spectrograms; got a waveform"),
    "clip": (EncodeRequest([Video(random_bytes(2, 4, 4, 3), [0.0], 1.0)]), "one timestamp for each frame"),
    "blank-text": (EncodeRequest([Text(" ")]), "expected a text"),
    "last-of-many": (EncodeRequest([picture(), sound(), Text("")]), "expected a text"),
    "generate": (GenerateRequest([ChatMessage("user", [TextPart("hello")])]), "does not generate: ask for embeddings"),
}


@for_each(("bad", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_fails_alone(bad: EncodeRequest | GenerateRequest, problem: str) -> None:
    good = EncodeRequest([picture()])
    before, error, after = execute(good, bad, good)
    assert isinstance(error, ValueError)
    assert problem in str(error)
    assert error.__traceback__ is None, "its frames would keep the slots of the inputs"
    assert error.__context__ is None
    assert torch.equal(embeddings_of(before), embeddings_of(after))


@for_each("ill", [False, True], ids=["good", "bad"])
def test_nothing_keeps_the_inputs(ill: bool) -> None:
    request = EncodeRequest([picture(), sound(), clip(), Text("" if ill else "a text")])
    watched = [
        weakref.ref(tensor) for tensor in (request.inputs[0].pixels, request.inputs[1].log_mel, request.inputs[2].frames)
    ]
    outputs = execute(request)
    assert isinstance(outputs[0], ValueError) is ill
    del request
    assert [reference() for reference in watched] == [None] * 3


def test_replies_share_no_memory_with_inputs_or_each_other() -> None:
    request = EncodeRequest([picture(), sound(), clip(), Text("a text")])
    first, second = map(embeddings_of, execute(request, request))
    kept = first.clone()
    for tensor in (request.inputs[0].pixels, request.inputs[1].log_mel, request.inputs[2].frames, second):
        tensor.zero_()
    assert torch.equal(first, kept)


def test_in_one_index_the_nearest_is_of_the_same_kind() -> None:
    photographs = [Image.open(path).convert("RGB").resize((96, 64)) for path in sorted(MEDIA.glob("*.jpg"))]
    pixels = [torch.from_numpy(np.array(photograph)) for photograph in photographs]
    black = torch.zeros(64, 96, 3, dtype=torch.uint8)
    time = torch.arange(200).unsqueeze(1) / 100
    bands = torch.arange(80)
    hills = [
        -((bands - 40.0 - 20 * torch.sin(pace * time)) ** 2) / width for pace, width in [(1, 9), (3, 30), (9, 9), (14, 60)]
    ]
    things = {
        "picture": [fingerprint_picture(image) for image in (*pixels, picture().pixels, black)],
        "sound": [fingerprint_sound(spectrogram) for spectrogram in (*hills, torch.full((50, 80), -30.0))],
        "clip": [fingerprint_clip(torch.stack([image, image.flip(0)]), [0.0, 1.0], 2.0) for image in (*pixels, black)],
        "text": [
            fingerprint_text(text)
            for text in ("the cat sat on the mat", "the dog sat on a log", "the cats and the dogs sat", "a")
        ],
    }
    crossing = max(
        float((torch.stack(fingerprints) @ torch.stack(other_fingerprints).T).max())
        for kind, fingerprints in things.items()
        for other_kind, other_fingerprints in things.items()
        if kind != other_kind
    )
    assert crossing < 0.2
    for kind in ("picture", "clip", "text"):  # of the sounds, silence is like nothing
        alike = torch.stack(things[kind]) @ torch.stack(things[kind]).T
        assert float((alike - 2 * torch.eye(len(alike))).amax(1).min()) > crossing, kind


def test_it_says_what_it_takes() -> None:
    executor = FingerprintsExecutor()
    assert isinstance(executor, Executor)
    assert executor.describe() == ModelDescription(
        executor="fingerprints",
        model="shmring-fingerprints",
        tasks=["encode"],
        input=InputSpec(
            text=True,
            picture=PictureSpec(),
            sound=SoundSpec(form="log_mel", sample_rate=16_000, mel_bands=80),
            video=VideoSpec(num_frames=16, max_pixels=512 * 512),
        ),
        max_batch_size=1024,
        pauses=True,
        embedding_size=512,
    )
    executor.forget(1)
    executor.close()


def test_how_media_are_prepared_can_be_chosen() -> None:
    options = ExecutorOptions(mm_processor_kwargs={"max_pixels": 50_000, "num_frames": 8})
    takes = FingerprintsExecutor(options).describe().input
    assert takes.picture == PictureSpec(max_pixels=50_000)
    assert takes.video == VideoSpec(num_frames=8, max_pixels=50_000)


@for_each(
    ("options", "problem"),
    [
        ({"model": "some/model"}, "loads no model"),
        ({"options": {"dtype": "float16", "device": "cpu"}}, "has no options; remove device, dtype"),
        ({"mm_processor_kwargs": {"min_pixels": 1}}, "does not know 'min_pixels'.*it knows max_pixels, num_frames"),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "max_pixels .*whole number from 1 to .*got 0"),
        ({"mm_processor_kwargs": {"max_pixels": True}}, "got True"),
        ({"mm_processor_kwargs": {"max_pixels": None}}, "got None"),
        ({"mm_processor_kwargs": {"max_pixels": 1e6}}, r"got 1000000\.0"),
        ({"mm_processor_kwargs": {"num_frames": 4097}}, "num_frames .*from 1 to 4096; got 4097"),
        ({"mm_processor_kwargs": {"num_frames": "16"}}, "got '16'"),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FingerprintsExecutor(ExecutorOptions(**options))
