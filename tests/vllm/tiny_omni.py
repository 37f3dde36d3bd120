"""Writes a model that sees clips and hears recordings: Qwen2.5-Omni, of a few thousand parameters, of which vLLM runs the half
that thinks. Its weights are vLLM's to make up: ``--load-format dummy``.

``python -m tests.vllm.tiny_omni DIRECTORY``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

from tests.byte_tokenizer import make_tokenizer

END, PADDING = "<|end|>", "<|pad|>"
MARKS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WIDTH = 128


def main(directory: Path) -> None:
    text = "What is in the clip, and what is said in it?"
    special = (END, PADDING, *MARKS.values())
    tokenizer = make_tokenizer([text], special, end=END, padding=PADDING, extra_special_tokens=MARKS)
    transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    ids = tokenizer.convert_tokens_to_ids
    thinker: dict[str, Any] = {
        "audio_config": {
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 64,
            "output_dim": WIDTH,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        "text_config": {
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        "audio_token_index": ids(MARKS["audio_token"]),
        "image_token_index": ids(MARKS["image_token"]),
        "video_token_index": ids(MARKS["video_token"]),
        "audio_start_token_id": ids(MARKS["audio_bos_token"]),
        "audio_end_token_id": ids(MARKS["audio_eos_token"]),
    }
    config = transformers.Qwen2_5OmniConfig(
        thinker_config=thinker, enable_audio_output=False, architectures=["Qwen2_5OmniModel"]
    )
    config.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
