"""From a request to what vLLM's engine is given: a prompt with its media, and how tokens are chosen.

vLLM's renderer lays a conversation out: it knows the template of each model that vLLM serves, and where media stand in it. Each
medium has the key under which frontends keep it, which vLLM uses in place of a hash of its own. At first, vLLM is given only
these keys. If it has seen all of the media, it takes what it made of them from its cache, and nobody reads a pixel. Otherwise
it is given the media as well, from the slab.

Callers' texts are only text (:mod:`.callers_texts`). vLLM has nothing that makes control tokens in them harmless, so they are
refused.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shmring.engine.executors.callers_texts import CallersTexts
from shmring.engine.executors.interface import ContextLengthError
from shmring.engine.executors.prompts import check_pixels, find_max_pixels
from shmring.engine.executors.sampling import GREEDY_BELOW, check_sampling, longest_answer
from shmring.engine.executors.stopping import StopTexts
from shmring.engine.protocol import (
    ChatMessage,
    GenerateRequest,
    InputSpec,
    Medium,
    MediumPart,
    Picture,
    PictureSpec,
    SamplingParams,
    Text,
)

__all__ = ["RequestBuilder"]

_MAX_STOP_TOKENS = 64  # beside min_tokens: on a GPU, vLLM's step fails beyond 128, with those that end any answer
_SEED_MODULUS = 1 << 63  # torch takes seeds of 64 bits with a sign; callers' seeds are any integers


class RequestBuilder:
    """Makes vLLM's requests of ours.

    Args:
        name: of the model, for errors.
        engine: vLLM's ``LLMEngine``.
        mm_processor_kwargs: as the engine was given them.

    Attributes:
        input: the inputs that can be asked about.
        texts: checks those of requests.
        tokenizer: of transformers.
    """

    def __init__(self, name: str, engine: Any, mm_processor_kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._renderer = engine.renderer
        self._config = engine.model_config
        self.tokenizer = self._renderer.get_tokenizer()
        if not hasattr(self.tokenizer, "added_tokens_decoder") or self._config.is_encoder_decoder:
            raise ValueError(f"the model {name!r} is none that goes on from a prompt, with a tokenizer of transformers")
        self._vocabulary_size = int(self._config.get_vocab_size())
        self._max_num_seqs = int(engine.vllm_config.scheduler_config.max_num_seqs)
        self._vllm = importlib.import_module("vllm")
        self._chat_params = importlib.import_module("vllm.renderers").ChatParams
        renderers = importlib.import_module("vllm.renderers.hf")
        template = renderers.resolve_chat_template(self.tokenizer, None, None, model_config=self._config)
        self.texts = CallersTexts(
            name,
            self.tokenizer,
            self._vocabulary_size,
            self._config.max_model_len,
            template=template,
            model=SimpleNamespace(config=self._config.hf_config),
        )
        self.input = self._describe_input(mm_processor_kwargs)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def build(self, request: GenerateRequest) -> dict[str, Any]:
        """Makes a request's prompt, with its media, as vLLM's engine takes it.

        Raises:
            ValueError: the conversation or its media are not what this model takes.
            ContextLengthError: it is too long.
        """
        media: list[Medium] = []
        if request.prompt is not None:
            prompt = self._continue(request.prompt, request)
        else:
            media, options = self.texts.open_conversation(request)
            prompt = self._lay_out(request.messages, request.media, add_generation_prompt=True, **options)
        inputs = self._process(prompt, media, add_special_tokens=request.add_special_tokens)
        ContextLengthError.check(len(inputs["prompt_token_ids"]), request.sampling.max_tokens, self._config.max_model_len)
        return inputs

    def build_input(self, item: Text | Medium) -> dict[str, Any]:
        """Makes a prompt of something that is to be embedded.

        Raises:
            ValueError, ContextLengthError: as :meth:`build`.
        """
        if isinstance(item, Text):
            if not isinstance(item.text, str):
                raise ValueError(f"the model {self._name!r} embeds texts and no tokens: send the text")
            self.texts.check_prompt(item.text, None, "a text to be embedded")
            self.texts.check_text(item.text)
            inputs = self._process({"prompt": item.text}, [], add_special_tokens=True)
        else:
            if not self.texts.has_template:
                raise ValueError(f"the model {self._name!r} has no chat template, so it embeds only texts")
            message = ChatMessage("user", [MediumPart(0)])
            inputs = self._process(self._lay_out([message], [item], add_generation_prompt=False), [item])
        count = len(inputs["prompt_token_ids"])
        if count > self._config.max_model_len:
            raise ContextLengthError(count, None, self._config.max_model_len)
        return inputs

    def _continue(self, prompt: str | list[int], request: GenerateRequest) -> dict[str, Any]:
        """All of a prompt is its caller's, who may therefore write control tokens."""
        self.texts.check_prompt(prompt, request.sampling.max_tokens)
        return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}

    def _lay_out(self, messages: Sequence[ChatMessage], media: Sequence[Medium], **options: Any) -> dict[str, Any]:
        """Returns the tokens of a conversation, with places for its media."""
        conversation = self.texts.lay_out(messages, media, self._place)
        _, prompt = self._renderer.render_messages(conversation, self._chat_params(chat_template_kwargs=options))
        return dict(prompt)

    def _place(self, medium: Medium) -> dict[str, Any]:
        if not isinstance(medium, Picture) or self.input.picture is None:
            raise ValueError(f"the model {self._name!r} takes no {type(medium).__name__.lower()}")
        check_pixels(medium.pixels, "a picture", ndim=3)
        return {"type": "image_url", "image_url": None, "uuid": "its place"}

    def _process(self, prompt: dict[str, Any], media: Sequence[Medium], *, add_special_tokens: bool = False) -> dict[str, Any]:
        """Returns a prompt with its tokens, and with its media, in their order, processed; at first without looking at them."""
        parameters = dataclasses.replace(self._renderer.default_cmpl_tok_params, max_total_tokens=None)
        if not add_special_tokens:
            parameters = dataclasses.replace(parameters, add_special_tokens=False)
        if media:
            keys = [medium.key for medium in media]
            prompt["multi_modal_uuids"] = {"image": keys}
            if None not in keys:
                try:
                    return self._rendered(prompt, parameters)
                except Exception:  # noqa: BLE001 - of something it has not seen before, vLLM's processors raise what they like
                    pass
            prompt["multi_modal_data"] = {"image": [_form_of(medium) for medium in media]}
        return self._rendered(prompt, parameters)

    def _rendered(self, prompt: dict[str, Any], parameters: Any) -> dict[str, Any]:
        [inputs] = self._renderer.render_cmpl([dict(prompt)], parameters)
        return dict(inputs)

    def _describe_input(self, mm_processor_kwargs: Mapping[str, Any]) -> InputSpec:
        processor = self._renderer.mm_processor
        limits = {} if processor is None else processor.info.allowed_mm_limits
        picture = None
        if limits.get("image") and self.texts.has_template:
            image_processor = getattr(processor.info.get_hf_processor(), "image_processor", None)
            has_size = hasattr(image_processor, "valid_kwargs")
            picture = PictureSpec(find_max_pixels(image_processor, mm_processor_kwargs) if has_size else None)
        return InputSpec(picture=picture, keys=True)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def sampling_of(self, request: GenerateRequest, prompt_tokens: int) -> Any:
        """Returns vLLM's ``SamplingParams``.

        Raises:
            ValueError: a parameter makes no sense.
        """
        params = request.sampling
        check_sampling(params)
        StopTexts(params.stop)
        if params.min_tokens and len(params.stop_token_ids) > _MAX_STOP_TOKENS:
            raise ValueError(f"with min_tokens, at most {_MAX_STOP_TOKENS} stop_token_ids are taken")
        if not 1 <= params.n <= self._max_num_seqs:
            raise ValueError(
                f"n must be from 1 to {self._max_num_seqs}, the answers that are written at a time, got {params.n}"
            )
        return self._vllm.SamplingParams(
            n=params.n,
            max_tokens=longest_answer(params, prompt_tokens, self._config.max_model_len),
            min_tokens=params.min_tokens,
            temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            top_p=params.top_p,
            top_k=params.top_k if 0 < params.top_k < self._vocabulary_size else 0,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias) or None,
            seed=None if params.seed is None else params.seed % _SEED_MODULUS,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            structured_outputs=self._structure_of(params),
            skip_special_tokens=not request.tools,  # which are what marks a call
            output_kind=importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA,
        )

    def _structure_of(self, params: SamplingParams) -> Any:
        if (structure := params.structured_outputs) is None:
            return None
        return importlib.import_module("vllm.sampling_params").StructuredOutputsParams(
            json=structure.json,
            json_object=structure.json_object or None,
            regex=structure.regex,
            choice=list(structure.choice) or None,
        )


def _form_of(medium: Medium) -> Any:
    """Returns a picture as vLLM's processors take it. It is one of Pillow's, a copy: those of some models take nothing else."""
    assert isinstance(medium, Picture), "it has a place"
    return importlib.import_module("PIL.Image").fromarray(medium.pixels.numpy())
