"""Models of real architectures, with random weights, small enough for a test: a second to write, milliseconds a token.

They are what the hub's models are, but for their size and their wits: configuration, weights, tokenizer, image processor and
chat template on disk, written by ``save_pretrained``. So everything that loads a model from a directory can be tried with
them, without a network: ``python -m tests.engine.tiny_models DIRECTORY`` writes one for ``shmring serve
--executor transformers --model DIRECTORY``.

The weights are drawn wider than models are initialised with, so that answers vary and depend on every token of the prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from tokenizers import AddedToken

from tests.byte_tokenizer import make_tokenizer

CONTEXT_LENGTH = 512
"""Tokens of prompt and answer together."""

_INITIALISER_RANGE = 0.5  # at the usual 0.02 every prompt gives almost the same answer

DECODER: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": _INITIALISER_RANGE,
}
"""The configuration of a decoder for tests that need a network and no tokenizer; architectures add what they need."""

_END, _PAD = "<|end|>", "<|pad|>"
_PICTURE_SIDE, _PATCH_SIDE = 28, 14
_VISION = MappingProxyType({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2})

_CORPUS = [
    "What is in the picture? A red boat lies on the beach, and two people are walking along the water.",
    "Describe the picture in one sentence. The cat sits on the chair and looks out of the window.",
    "Über den Wolken: naïve café, Größe, señor, 日本語のテキスト, 你好世界, привет, 🙂🚀.",
    "You are a helpful assistant. Answer briefly, with a list of the things that you see.",
]

# Parts in their order; a system message first if there is one. Content is a list of parts, as multimodal templates expect.
_PICTURE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}" + _END + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}"
    + _END
    + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(path: Path | str, architecture: str = "llava", *, chat_template: bool = True) -> Path:
    """Writes a model with random weights, the same at each call.

    Args:
        path: a directory; made if it is not there.
        architecture: one of :data:`ARCHITECTURES`.
        chat_template: whether it has one.

    Returns:
        The directory.
    """
    directory = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        ARCHITECTURES[architecture](directory, chat_template)
    return directory


def _make_tokenizer(special_tokens: list[str], **names: str) -> transformers.PreTrainedTokenizerFast:
    """Makes a byte-level BPE tokenizer: every byte is a token, and so are the commonest pairs of a few sentences.

    Args:
        special_tokens: beside the end of a message and padding.
        **names: by which its processor asks it for some of them.
    """
    special = (_END, _PAD, *special_tokens)
    return make_tokenizer(_CORPUS, special, end=_END, padding=_PAD, extra_special_tokens=names)


def _text_settings(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": _INITIALISER_RANGE,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def _save_model(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, path: Path) -> None:
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)


def _write_llama(path: Path, chat_template: bool) -> None:
    """Text only."""
    tokenizer = _make_tokenizer([])
    tokenizer.chat_template = _TEXT_TEMPLATE if chat_template else None
    tokenizer.save_pretrained(path)
    config = transformers.LlamaConfig(**_text_settings(tokenizer))
    _save_model(transformers.LlamaForCausalLM(config), tokenizer, path)


def write_llava(
    path: Path,
    chat_template: bool = True,
    *,
    side: int = _PICTURE_SIDE,
    vision: Mapping[str, Any] = _VISION,
    text: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Every picture is cut to one size, and becomes a token for each patch: four in a tiny one.

    Args:
        path: a directory; made if it is not there.
        chat_template: whether it has one.
        side: of pictures, in pixels.
        vision: how large its tower of CLIP is.
        text: what its Llama has that is not tiny.
        dtype: of weights.
    """
    tokenizer = _make_tokenizer(["<image>"])
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **vision, image_size=side, patch_size=_PATCH_SIDE, initializer_range=_INITIALISER_RANGE
        ),
        text_config=transformers.LlamaConfig(**(_text_settings(tokenizer) | dict(text))),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        ),
        tokenizer=tokenizer,
        patch_size=_PATCH_SIDE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_PICTURE_TEMPLATE.replace("PICTURE", "<image>") if chat_template else None,
    )
    processor.save_pretrained(path)
    _save_model(transformers.LlavaForConditionalGeneration(config).to(dtype), tokenizer, path)


def _write_gemma3(path: Path, chat_template: bool) -> None:
    """Layers that look back a few tokens only stand beside ones that look back all the way; pictures see themselves whole."""
    tokenizer = _make_tokenizer(
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    text = transformers.Gemma3TextConfig(
        **_text_settings(tokenizer),
        tie_word_embeddings=False,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = transformers.SiglipVisionConfig(**_VISION, image_size=4 * _PATCH_SIDE, patch_size=_PATCH_SIDE)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,  # or every token would be followed by itself
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
    )
    side = {"height": 4 * _PATCH_SIDE, "width": 4 * _PATCH_SIDE}
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size=side),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=_PICTURE_TEMPLATE.replace("PICTURE", "<start_of_image>") if chat_template else None,
    )
    processor.save_pretrained(path)
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # nought, by which pictures vanish
    _save_model(model, tokenizer, path)


def _write_idefics3(path: Path, chat_template: bool) -> None:
    """Pictures are cut into tiles, so that a larger one becomes more tokens."""
    tiles = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    tokenizer = _make_tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles])
    vision = transformers.models.idefics3.configuration_idefics3.Idefics3VisionConfig(
        **_VISION, image_size=4 * _PATCH_SIDE, patch_size=_PATCH_SIDE
    )
    config_type: Any = transformers.Idefics3Config  # which takes more than it declares
    config = config_type(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_text_settings(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 8 * _PATCH_SIDE}, max_image_size={"longest_edge": 4 * _PATCH_SIDE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_PICTURE_TEMPLATE.replace("PICTURE", "<image>") if chat_template else None,
    )
    processor.save_pretrained(path)
    _save_model(transformers.Idefics3ForConditionalGeneration(config), tokenizer, path)


def _write_qwen2_vl(path: Path, chat_template: bool) -> None:
    """Pictures and clips of any size; positions have three dimensions. Its processor needs torchvision."""
    tokenizer = _make_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    ids = tokenizer.convert_tokens_to_ids
    text = _text_settings(tokenizer) | {
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": _PATCH_SIDE,
            "mlp_ratio": 2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    template = _PICTURE_TEMPLATE.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    pixels = {"shortest_edge": 4 * _PATCH_SIDE**2, "longest_edge": 64 * _PATCH_SIDE**2}
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(size=pixels),
        chat_template=template.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>") if chat_template else None,
    )
    processor.save_pretrained(path)
    _save_model(transformers.Qwen2VLForConditionalGeneration(config), tokenizer, path)


def _write_whisper(path: Path, _: bool) -> None:
    """Hears windows of 30 s; two languages, and a token for each fiftieth of a second."""
    text = _make_tokenizer([])
    state = json.loads(text.backend_tokenizer.to_str())["model"]
    tokenizer = transformers.WhisperTokenizer(vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]])
    marks = [f"<|{number / 50:.2f}|>" for number in range(1501)]
    special = [
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
    ]
    for names, is_special in (([*special, "<|nospeech|>", "<|notimestamps|>"], True), (marks, False)):
        tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in names])
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=128,  # heads of 64: vLLM's attention on CPUs takes none of 16
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_target_positions=64,
        init_std=_INITIALISER_RANGE,
        decoder_start_token_id=ids("<|startoftranscript|>"),
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        max_length=config.max_target_positions,
        is_multilingual=True,
        lang_to_id={name: ids(name) for name in ("<|en|>", "<|de|>")},
        task_to_id={name: ids(f"<|{name}|>") for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        max_initial_timestamp_index=50,
        suppress_tokens=[ids(name) for name in [*special, "<|nospeech|>"]],
        return_timestamps=False,
        alignment_heads=[[0, 1], [1, 0]],
    )
    processor = transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer)
    processor.save_pretrained(path)
    model.save_pretrained(path)


ARCHITECTURES: dict[str, Callable[[Path, bool], None]] = {
    "llama": _write_llama,
    "llava": write_llava,
    "gemma3": _write_gemma3,
    "idefics3": _write_idefics3,
    "qwen2_vl": _write_qwen2_vl,
    "whisper": _write_whisper,
}
"""What can be written, by name."""

TORCHVISION_ARCHITECTURES = frozenset({"qwen2_vl"})
"""Those whose processors need torchvision."""


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or (sys.argv[2:3] and sys.argv[2] not in ARCHITECTURES):
        raise SystemExit(f"usage: python {sys.argv[0]} DIRECTORY [{'|'.join(ARCHITECTURES)}]")
    print(write_tiny_model(*sys.argv[1:]))
