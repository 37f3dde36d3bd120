"""What encoder outputs are kept under, where that can't be told, and the settings; vLLM's configuration is made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmring.integrations.vllm.encoder_keys import EncoderKeys, check_configuration
from shmring.integrations.vllm.encoder_settings import EncoderSettings
from tests.tables import for_each
from tests.vllm.made_up_configuration import configuration

ROOT = Path(__file__).resolve().parents[2]
HASH = "9f86d081884c7d659a2feaa0c55ad015"


def key(
    change: Callable[[Any], object] = lambda config: None,
    *,
    identifier: str = HASH,
    version: str = "0.32.0",
    settings: EncoderSettings | None = None,
) -> bytes | None:
    config = configuration()
    change(config)
    return EncoderKeys(config, settings or EncoderSettings(), version).of(identifier)


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute of the configuration."""

    def change(config: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return change


MEDIA = "model_config.multimodal_config"


def test_two_instances_with_one_configuration_have_one_key_of_32_bytes() -> None:
    assert key() == key()
    assert len(key() or b"") == 32


@for_each(
    ("path", "value"),
    [
        ("model_config.model", "llava-hf/llava-1.5-13b-hf"),
        ("model_config.model_weights", "s3://models/llava"),
        ("model_config.revision", "1a2b"),
        ("model_config.hf_config._commit_hash", "3c4d"),
        ("model_config.hf_overrides", {"vision_feature_layer": -2}),
        ("model_config.dtype", torch.float16),
        ("model_config.quantization", "fp8"),
        (f"{MEDIA}.mm_processor_kwargs", {"num_crops": 4}),
        (f"{MEDIA}.mm_processor_kwargs", {"images_kwargs": {"size": {"longest_edge": 512}}}),
        (f"{MEDIA}.media_io_kwargs", {"video": {"num_frames": 40}}),
        (f"{MEDIA}.video_pruning_rate", 0.5),
        (f"{MEDIA}.mm_device_do_normalize", False),
        (f"{MEDIA}.mm_encoder_attn_dtype", "fp8"),
    ],
)
def test_all_that_makes_the_bytes_what_they_are_makes_another_key(path: str, value: Any) -> None:
    assert key(put(path, value)) not in (None, key())


def test_the_medium_the_version_and_what_stands_for_the_model_make_another_key() -> None:
    keys = {
        key(),
        key(identifier=HASH[::-1]),
        key(identifier=f"adapter:{HASH}"),
        key(version="0.33.0"),
        key(settings=EncoderSettings(model="ours")),
    }
    assert None not in keys
    assert len(keys) == 5


@for_each(
    ("path", "value"),
    [
        (f"{MEDIA}.mm_processor_kwargs", {"device": "cuda"}),  # which vLLM adds by itself where an instance only encodes
        (f"{MEDIA}.mm_processor_kwargs", {}),
        (f"{MEDIA}.media_io_kwargs", {"video": {"backend": "torchcodec", "device": "cuda"}}),
        (f"{MEDIA}.mm_processor_cache_gb", 0.5),
        ("cache_config.enable_prefix_caching", False),
    ],
)
def test_where_media_are_prepared_and_what_is_cached_makes_no_other_key(path: str, value: Any) -> None:
    assert key(put(path, value)) == key()


def test_a_build_for_cpus_of_one_version_has_the_same_keys() -> None:
    assert key(version="0.32.0+cpu") == key()


def test_one_model_has_one_key_wherever_it_lies_if_a_setting_stands_for_it() -> None:
    ours = EncoderSettings(model="llava, revision 1a2b")
    assert key(put("model_config.model", "/mnt/llava"), settings=ours) == key(settings=ours)


def test_functions_in_options_do_not_make_a_key_of_each_process() -> None:
    def override(config: Any) -> Any:
        return config

    def another(config: Any) -> Any:
        return config

    first, again, second = (key(put("model_config.hf_overrides", each)) for each in (override, override, another))
    assert first == again != second


@for_each("identifier", ["renderer0-mm-1-image-0", "renderer12-mm-345-video-6", "adapter:renderer0-mm-1-image-0"])
def test_a_number_that_vllm_has_counted_up_is_no_key(identifier: str) -> None:
    assert key(identifier=identifier) is None


# -- where vLLM must not start so ------------------------------------------------------------------------------------------


def refused(*changes: Callable[[Any], object], settings: EncoderSettings | None = None) -> str:
    config = configuration()
    for change in changes:
        change(config)
    try:
        check_configuration(config, settings or EncoderSettings())
    except ValueError as error:
        return str(error)
    return ""


NO_CACHE, NO_PREFIXES = put(f"{MEDIA}.mm_processor_cache_gb", 0), put("cache_config.enable_prefix_caching", False)
LORA = put("lora_config", SimpleNamespace(enable_tower_connector_lora=True))


def test_a_usual_configuration_is_not_refused() -> None:
    assert refused() == refused(NO_CACHE) == refused(NO_PREFIXES) == ""


def test_where_vllm_counts_media_the_error_says_what_to_do() -> None:
    error = refused(NO_CACHE, NO_PREFIXES)
    assert "renderer0-mm-1-image-0" in error
    assert "--mm-processor-cache-gb above 0" in error
    assert "--enable-prefix-caching" in error


def test_adapters_that_change_encoders_have_to_be_named_and_others_not() -> None:
    assert 'add "adapters" to ec_connector_extra_config' in refused(LORA)
    assert refused(put("lora_config", SimpleNamespace(enable_tower_connector_lora=False))) == ""
    named = [EncoderSettings(adapters=each) for each in ("of today", "of tomorrow")]
    assert refused(LORA, settings=named[0]) == ""
    assert key(LORA, settings=named[0]) != key(LORA, settings=named[1])
    assert key(settings=named[0]) == key(settings=named[1])


@for_each(
    ("path", "value", "text"),
    [
        ("model_config.multimodal_config", None, "takes no media"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ],
)
def test_a_model_whose_outputs_it_never_gets_is_refused(path: str, value: Any, text: str) -> None:
    assert text in refused(put(path, value))


# -- settings ----------------------------------------------------------------------------------------------------------------


def test_settings_are_read() -> None:
    assert EncoderSettings.of({}) == EncoderSettings()
    given = {"store": "ours", "start": True, "slab": "8GiB", "socket_dir": "/run/x", "wait_s": 1, "look_s": 0.5, "model": "m"}
    read = EncoderSettings.of(given | {"adapters": "a"})
    assert (read.store, read.start, read.slab, read.wait_s, read.look_s) == ("ours", True, 8 << 30, 1.0, 0.5)
    assert (read.socket_dir, read.model, read.adapters) == ("/run/x", "m", "a")


@for_each(
    ("name", "value", "text"),
    [
        ("store", "a/b", "store = 'a/b' can't be used: 'a/b' can't name an engine"),
        ("start", "yes", "it has to be true or false"),
        ("slab", "lots", "slab = 'lots' can't be used"),
        ("slab", "1MiB", "it has to be a size of 16MiB or more, such as 8GiB"),
        ("slab", "99999999TiB", "slab = '99999999TiB' can't be used"),
        ("wait_s", "soon", "it is a number of seconds"),
        ("wait_s", 11, "it must be between 0 and 10 seconds"),
        ("look_s", -1, "it must be between 0 and 1 seconds"),
        ("model", 7, "it has to be a text"),
        ("shmring_name", "x", "has 'shmring_name', which shmring does not know, but store, start, slab"),
    ],
)
def test_a_setting_that_cant_be_used_is_an_error_that_names_it(name: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        EncoderSettings.of({name: value})


def test_the_page_lists_the_settings() -> None:
    page = (ROOT / "docs" / "stages.md").read_text()
    section = page.partition("## vLLM: encoder outputs")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    assert listed == list(EncoderSettings.__dataclass_fields__)
