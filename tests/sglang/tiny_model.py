"""Writes a Qwen2-VL with random weights that computes nearly nothing, and whose processed pictures are large.

``python -m tests.sglang.tiny_model DIRECTORY``. SGLang has a class of its own for this model. A picture of 672 x 672 pixels
becomes 10.8 MB of float32, as each is there twice (for two moments of a clip).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from tests.byte_tokenizer import make_tokenizer

END, PADDING = "<|im_end|>", "<|endoftext|>"
SPECIAL = [
    *(PADDING, "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
]
TEXTS = [
    "What is in the picture? A red boat lies on the beach.",
    "Describe the picture in one sentence. The cat sits on the chair.",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 14
MERGED = 2  # patches in a row that are one token


def main(directory: Path) -> None:
    torch.manual_seed(7)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer(TEXTS, SPECIAL, end=END, padding=PADDING, least=0)
    pictures = Qwen2VLImageProcessor(
        min_pixels=56 * 56, max_pixels=4096 * 4096, patch_size=PATCH, merge_size=MERGED, temporal_patch_size=2
    )
    transformers.Qwen2VLProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    model = transformers.Qwen2VLForConditionalGeneration(make_config(tokenizer)).to(torch.bfloat16)
    model.save_pretrained(directory)


def make_config(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PretrainedConfig:
    def number(text: str) -> int:
        token: int = tokenizer.convert_tokens_to_ids(text)
        return token

    text = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": False,
        "bos_token_id": number(PADDING),
        "eos_token_id": number(END),
    }
    vision = {
        "depth": 1,
        "embed_dim": 32,
        "num_heads": 2,
        "mlp_ratio": 1,
        "hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
        "in_chans": 3,
        "in_channels": 3,
    }
    return transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
