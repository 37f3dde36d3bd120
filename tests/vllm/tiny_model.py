"""Writes a multimodal model with random weights that computes nearly nothing, and whose processed pictures are large.

``python tests/vllm/tiny_model.py DIRECTORY SIDE``: LLaVA, that is CLIP's vision tower and Llama, of some thousand
parameters. A picture becomes ``SIDE * SIDE * 3`` bfloat16 numbers. The processor neither resizes nor crops: pictures have
to come in that size, and preparing one takes no longer than it must.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END, PADDING, IMAGE = "<|end|>", "<|pad|>", "<image>"
TEXTS = [
    "What is in the picture? A red boat lies on the beach.",
    "Describe the picture in one sentence. The cat sits on the chair.",
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PATCHES = 4  # in a row: a picture is 17 tokens


def main(directory: Path, side: int) -> None:
    torch.manual_seed(7)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    patch = side // PATCHES
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=side, patch_size=patch
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    pictures = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, do_resize=False, do_center_crop=False
    )
    transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    model = transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of all bytes and a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, PADDING, IMAGE)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
