"""A program: asks vLLM's engine itself, then through the executor that hosts it; prints what was answered, and what was seen.

``python -m tests.vllm.hosted MODEL``, or ``python -m tests.vllm.hosted MODEL embed``: with the model run for embeddings.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bench.vllm.server import QUIET_ENVIRONMENT, model
from shmring.engine.executors import ExecutorOptions, StepInput, preparing, trials, vllm_requests
from shmring.engine.executors import vllm as vllm_module
from shmring.engine.executors.vllm import VllmExecutor
from shmring.engine.protocol import (
    ChatMessage,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    MediumPart,
    Picture,
    SamplingParams,
    StructuredOutputsParams,
    Text,
    TextPart,
)

SIDE = 416
TOKENS = 12
TEXTS = ["What is in the picture?", "The cat sits on the chair.", "A red boat"]
ENGINE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}


def write_model(path: Path) -> None:
    """Writes the tiny model with its weights under the names that vLLM 0.32 reads: made-up ones say the same to everything."""
    shutil.copytree(model(SIDE), path)
    weights = load_file(path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def picture(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def embed(path: str) -> None:
    pooling = {"runner": "pooling", "convert": "embed"}
    executor = VllmExecutor(ExecutorOptions(model=path, options=ENGINE | pooling))
    from vllm import PoolingParams

    alone = []
    for text in TEXTS:
        executor._engine.add_request("alone", text, PoolingParams(task="embed"))
        while executor._engine.has_unfinished_requests():
            outputs = executor._engine.step()
        alone.append(outputs[0].outputs.data.float())
    run = Run(executor, itertools.count(1))
    texts = [Text(text) for text in TEXTS]
    requests = [EncodeRequest([*texts]), EncodeRequest([Picture(torch.from_numpy(picture(1).copy())), texts[0], *texts * 4])]
    [few], [many] = run.all(requests)
    refused = [*run.all([EncodeRequest([Text(text)]) for text in ("", "<image>", "word " * 3000)]), *run.all([ask("text")])]
    seen = {
        "in pieces": embed_in_pieces(executor, run),
        "tasks": executor.describe().tasks,
        "size": executor.describe().embedding_size,
        "shapes": [list(few.embeddings.shape), list(many.embeddings.shape)],
        "tokens": few.prompt_tokens,
        "lengths": many.embeddings.norm(dim=1).tolist(),
        "likeness": [float(a @ b / b.norm()) for a, b in zip(few.embeddings, alone, strict=True)],
        "same again": float(many.embeddings[1] @ few.embeddings[0]),
        "refused": [type(each).__name__ for each in refused],
        "left": executor._engine.get_num_unfinished_requests(),
    }
    print("seen", json.dumps(seen))
    executor.close()


def embed_in_pieces(executor: VllmExecutor, run: Run) -> dict[str, Any]:
    """Many pictures in a request, beside one in another; and long texts beside short ones."""
    builder, ahead = executor._builder, 0
    made: list[list[str]] = []
    build_input, most, long = builder.build_input, vllm_module._MOST_AHEAD, preparing._LONG_CHARACTERS

    def note(item: Any) -> Any:
        nonlocal ahead
        made.append([getattr(item, "key", None) or item.text[:4], threading.current_thread().name.rpartition("_")[0]])
        for request in executor._requests.values():
            ahead = max(ahead, len(request.names) - len(request.embeddings))
        return build_input(item)

    builder.build_input = note
    vllm_module._MOST_AHEAD, preparing._LONG_CHARACTERS = 3, 400
    pixels = torch.from_numpy(picture(1).copy())
    many = EncodeRequest([Picture(pixels, key=f"many {number}") for number in range(12)])
    one = EncodeRequest([Picture(pixels, key="one")])
    [first], [second] = run.all([many, one])
    pictures, made[:] = [key for key, _ in made], []
    texts = [Text("long " * 90), *[Text(f"t{number:02}") for number in range(20)], Text("more " * 90)]
    [mixed], [alone] = run.all([EncodeRequest([*texts]), EncodeRequest([Text("t07")])])
    mixed_texts, made[:] = list(made), []
    run.all([EncodeRequest([Text(f"many {number:02} {'x' * 90}") for number in range(40)]), EncodeRequest([Text("one")])])
    in_turn = [text for text, _ in made]
    vllm_module._MOST_AHEAD, preparing._LONG_CHARACTERS = most, long
    builder.build_input = build_input
    return {
        "pictures": pictures,
        "ahead": ahead,
        "texts": mixed_texts,
        "in turn": in_turn,
        "shapes": [len(each.embeddings) for each in (first, second, mixed, alone)],
        "same": [float(first.embeddings[11] @ second.embeddings[0]), float(mixed.embeddings[8] @ alone.embeddings[0])],
        "left": len(executor._requests),
    }


def generate(path: str) -> None:
    refused = error_of(lambda: VllmExecutor(ExecutorOptions(model=path, options={"max_modle_len": 1})))
    executor = VllmExecutor(ExecutorOptions(model=path, options=ENGINE))
    prompts: list[Any] = [f"user: {text}<|end|>\nassistant: " for text in TEXTS]
    looked_at = {"image": Image.fromarray(picture(1))}
    prompts.append({"prompt": f"user: <image>{TEXTS[0]}<|end|>\nassistant: ", "multi_modal_data": looked_at})
    alone = [vllms_own(executor, prompt) for prompt in prompts]
    print("seen", json.dumps({"alone": alone, "refused": refused, **look(executor)}))
    executor.close()


def look(executor: VllmExecutor) -> dict[str, Any]:
    """What the executor does with requests that are handed to it as the engine core hands them."""
    numbers = itertools.count(1)

    def run(*requests: GenerateRequest) -> list[list[GenerateReply]]:
        """The replies to requests that come at the same time, or the error of each."""
        return Run(executor, numbers).all(requests)

    made = 0
    form_of = vllm_requests._form_of

    def count(medium: Any) -> Any:
        nonlocal made
        made += 1
        return form_of(medium)

    vllm_requests._form_of = count
    pixels = torch.from_numpy(picture(1).copy())
    gone = weakref.ref(pixels)
    [first] = run(ask(Picture(pixels, key="first"), TEXTS[0], logprobs=0))
    seen: dict[str, Any] = {
        "first": joined(first),
        "texts": [joined(each) for each in run(*(ask(text, logprobs=0) for text in TEXTS))],
    }
    del pixels
    gc.collect()
    seen |= {"pixels are gone": gone() is None, "looked at": [made]}
    blank = torch.zeros((SIDE, SIDE, 3), dtype=torch.uint8)  # not what is kept under its key: nobody looks
    again = run(ask(Picture(blank, key="first"), TEXTS[0], logprobs=0))[0]
    seen["looked at"].append(made)
    new = run(*(ask(Picture(blank, key=key), TEXTS[0], logprobs=0) for key in ("second", None)))
    seen["looked at"].append(made)
    seen["again"], seen["new"] = joined(again), [joined(replies) for replies in new]
    [several] = run(ask(TEXTS[0], n=3, temperature=1.0, seed=5))
    seen["several"] = [joined([reply for reply in several if reply.index == index]) for index in range(3)]
    [likely] = run(ask(TEXTS[0], logprobs=2))
    seen["logprobs"] = [msgspec.to_builtins(each) for reply in likely for each in reply.logprobs]
    schema = {"type": "array", "items": {"enum": ["x", "yz"]}, "minItems": 2, "maxItems": 2}
    structures = [
        StructuredOutputsParams(json=json.dumps(schema)),
        StructuredOutputsParams(choice=["red", "blue"]),
        StructuredOutputsParams(regex="[a-c]{3}"),
    ]
    structured = run(*(ask(TEXTS[1], structured_outputs=each, ignore_eos=False, max_tokens=40) for each in structures))
    seen["structured"] = [joined(replies) for replies in structured]
    [stopped] = run(ask(TEXTS[0], stop_token_ids=[again[0].token_ids[0]], min_tokens=3))
    seen["min_tokens"] = [stopped[-1].completion_tokens, stopped[-1].finish_reason]
    odd: list[dict[str, Any]] = [
        {"n": 2},
        {"n": 10**9, "temperature": 1.0},
        {"logprobs": 10**6},
        {"logit_bias": {10**6: 1.0}},
        {"stop_token_ids": [10**6]},
        {"min_tokens": 100},
        {"temperature": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": 10**6},
        {"structured_outputs": StructuredOutputsParams(regex="(")},
        {"structured_outputs": StructuredOutputsParams(json='{"type": "nothing"')},
    ]
    seen["threads"] = threads_of(executor, run)
    trials._TIMEOUT_S, timeout_s = 0.0, trials._TIMEOUT_S
    seen["busy"] = type(run(ask(TEXTS[0], structured_outputs=StructuredOutputsParams(regex="busy")))[0]).__name__
    trials._TIMEOUT_S = timeout_s
    seen["odd"] = {repr(each): type(run(ask(TEXTS[0], **each))[0]).__name__ for each in odd}
    run(ask(TEXTS[0], seed=-(2**70), top_k=2**40, repetition_penalty=1e300, temperature=1.0))
    seen["unfinished"] = executor._engine.get_num_unfinished_requests()
    aborted = next(numbers)
    executor.execute([StepInput(aborted, ask(TEXTS[0], max_tokens=400))])
    executor.execute([StepInput(aborted, None)])
    unprepared = next(numbers)
    executor.execute([StepInput(unprepared, ask(Picture(blank, key="third"), TEXTS[0])), StepInput(aborted, None)])
    seen["running"] = executor._engine.get_num_unfinished_requests()
    executor.forget(aborted)
    executor.forget(unprepared)
    seen["queue"] = queue_of_media(executor, numbers)
    seen["left"] = executor._engine.get_num_unfinished_requests() + len(executor._requests)
    seen["after"] = joined(run(ask(Picture(blank, key="third"), TEXTS[0]))[0])
    executor.reset_mm_cache()
    run(ask(Picture(torch.from_numpy(picture(1).copy()), key="first"), TEXTS[0]))
    seen["looked at"].append(made)
    return seen


def queue_of_media(executor: VllmExecutor, numbers: Iterator[int]) -> dict[str, Any]:
    """What becomes of media, and of a reset, that wait while a medium is prepared."""
    begun: list[str | None] = []
    started, may_end = threading.Event(), threading.Event()
    builder, engine = executor._builder, executor._engine
    build, reset = builder.build, engine.reset_mm_cache

    def wait_and_build(request: GenerateRequest) -> Any:
        begun.append(request.media[0].key)
        started.set()
        may_end.wait()
        return build(request)

    builder.build, engine.reset_mm_cache = wait_and_build, lambda: begun.append("a reset")
    requests = [next(numbers) for _ in range(3)]
    pixels = [torch.from_numpy(picture(seed).copy()) for seed in range(3)]
    gone = weakref.ref(pixels[1])
    for number, seed in zip(requests, range(3), strict=True):
        request = ask(Picture(pixels[seed], key=f"medium {seed}"), "Hi")
        request.owner = "of media"
        executor.execute([StepInput(number, request)])
    del request
    pixels.clear()
    started.wait()
    executor.forget(requests[1])
    gc.collect()
    seen = {"an aborted one is gone": gone() is None}
    resetting = threading.Thread(target=executor.reset_mm_cache)
    resetting.start()
    while "" not in executor._preparing.threads["media"]._waiting:
        time.sleep(0.001)
    may_end.set()
    resetting.join()
    while len(begun) < 3:
        time.sleep(0.001)
    for number in requests:
        executor.forget(number)
    builder.build, engine.reset_mm_cache = build, reset
    return seen | {"begun": begun}


def threads_of(executor: VllmExecutor, run: Any) -> dict[str, list[str]]:
    """On which threads prompts are made of requests of each kind."""
    builder = executor._builder
    threads: dict[str, list[str]] = defaultdict(list)
    build = builder.build

    def noted(request: GenerateRequest) -> Any:
        kind = "pictures" if request.media else "texts" if vllm_module.count_characters(request) > 150 else "short"
        threads[kind].append(threading.current_thread().name.rpartition("_")[0])
        return build(request)

    builder.build = noted
    preparing._LONG_CHARACTERS, most = 150, preparing._LONG_CHARACTERS
    long = "A long text. " * 18
    tokenizing = GenerateRequest(prompt=long, tokenize=True)
    run(ask(TEXTS[0]), ask(long), ask(Picture(torch.from_numpy(picture(2).copy())), "Hi"), tokenizing)
    preparing._LONG_CHARACTERS = most
    builder.build = build
    return threads


def ask(*parts: str | Picture, **sampling: Any) -> GenerateRequest:
    media = [part for part in parts if isinstance(part, Picture)]
    places = itertools.count()
    content = [TextPart(part) if isinstance(part, str) else MediumPart(next(places)) for part in parts]
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True} | sampling
    return GenerateRequest([ChatMessage("user", [*content])], [*media], SamplingParams(**sampling))


class Run:
    """Steps, until all of some requests have ended."""

    def __init__(self, executor: VllmExecutor, numbers: Iterator[int]) -> None:
        self._executor = executor
        self._numbers = numbers

    def all(self, requests: Sequence[EncodeRequest | GenerateRequest]) -> list[Any]:
        payloads: dict[int, EncodeRequest | GenerateRequest | None] = {next(self._numbers): request for request in requests}
        replies: dict[int, Any] = defaultdict(list)
        order = list(payloads)
        requests = ()
        while payloads:
            outputs = self._executor.execute([StepInput(number, payload) for number, payload in payloads.items()])
            for number, output in zip(list(payloads), outputs, strict=True):
                if isinstance(output, Exception):
                    replies[number] = output
                    del payloads[number]
                    continue
                replies[number] += [reply for reply in (output.reply, *output.others) if reply is not None]
                if not output.keep_inputs:
                    payloads[number] = None
                if output.finished:
                    del payloads[number]
                    self._executor.forget(number)
        return [replies[number] for number in order]


def joined(replies: Any) -> Any:
    """The answer that these are the pieces of."""
    if isinstance(replies, Exception):
        return repr(replies)
    return {
        "text": "".join(reply.text for reply in replies),
        "tokens": [token for reply in replies for token in reply.token_ids],
        "finish_reason": replies[-1].finish_reason,
        "prompt_tokens": replies[-1].prompt_tokens,
        "logprobs": [each.logprob for reply in replies for each in reply.logprobs],
    }


def vllms_own(executor: VllmExecutor, prompt: Any) -> dict[str, Any]:
    """What vLLM answers to a prompt that it was given by itself, as its own API server would."""
    from vllm import SamplingParams as Params

    engine = executor._engine
    engine.add_request("alone", prompt, Params(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    [answer] = outputs[0].outputs
    likely = [each[token].logprob for token, each in zip(answer.token_ids, answer.logprobs, strict=True)]
    return {
        "text": answer.text,
        "tokens": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(outputs[0].prompt_token_ids),
        "logprobs": likely,
    }


def error_of(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    os.environ |= QUIET_ENVIRONMENT
    (embed if sys.argv[2:] == ["embed"] else generate)(sys.argv[1])
