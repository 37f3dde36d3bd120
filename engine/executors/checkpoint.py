"""Loading a model, with its tokenizer and processor, from a directory or the Hugging Face hub.

Weights are taken from safetensors files only, and no code is ever run that comes with a model: nothing here unpickles or
trusts remote code. A directory is loaded without a look at the network. A model some of whose weights are missing is refused;
transformers would fill them with noise and say so in a log.

transformers is imported here, and only when a checkpoint is loaded: it takes seconds, and is an extra
(``.[transformers]``).
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shmring.engine.executors.failures import first_line

__all__ = [
    "SPEECH_MODEL",
    "Checkpoint",
    "LoadSettings",
    "ModelSource",
    "find_eos",
    "find_model_type",
    "import_transformers",
    "load_checkpoint",
]

#: The type of models that write down what is said in recordings.
SPEECH_MODEL = "whisper"

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_DEVICES = ("auto", "cpu", "cuda")

# For a model that names no limit, so that an answer without max_tokens ends some time.
_DEFAULT_MAX_MODEL_LEN = 4096

_MISSING_SHOWN = 3  # names of missing weights in an error; there can be hundreds


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a model is loaded.

    Attributes:
        dtype: ``"auto"`` is the checkpoint's own.
        device: ``"auto"`` is CUDA where there is one, otherwise the CPU.
        attn_implementation: as transformers names it (``"sdpa"``, ``"eager"``, ``"flash_attention_2"``); None: its choice.
            Models that read several requests together use it where they look at media.
        max_model_len: tokens of prompt and answer together; None: what the model was made for.
    """

    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.device not in _DEVICES and not str(self.device).startswith("cuda:"):
            raise ValueError(f"device must be one of {', '.join(_DEVICES)} or cuda:INDEX, got {self.device!r}")
        if self.max_model_len is not None and (type(self.max_model_len) is not int or self.max_model_len < 2):
            raise ValueError(f"max_model_len must be a whole number of at least 2, got {self.max_model_len!r}")


class ModelSource(NamedTuple):
    """Where a model is.

    Attributes:
        source: as libraries take it.
        name: what requests call it: the last part of a directory's path, or the hub's name.
        is_local: whether it is a directory.
    """

    source: str
    name: str
    is_local: bool

    @classmethod
    def of(cls, model: str) -> ModelSource:
        """Looks for a model: a directory, or a name on the hub."""
        directory = Path(model).expanduser()
        return cls(str(directory), directory.resolve().name, True) if directory.is_dir() else cls(model, model, False)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model, ready to be used.

    Attributes:
        name: what requests call it.
        model: a ``PreTrainedModel`` in evaluation mode, on its device.
        tokenizer: of its text.
        processor: of its text and media; None: it takes text only.
        eos_token_ids: tokens that end an answer.
        max_model_len: tokens of prompt and answer together.
    """

    name: str
    model: Any
    tokenizer: Any
    processor: Any | None
    eos_token_ids: frozenset[int]
    max_model_len: int


def import_transformers() -> Any:
    """Imports transformers.

    Raises:
        ImportError: it is not installed.
    """
    try:
        importlib.import_module("jinja2")  # chat templates need it; transformers would say so at the first request
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the transformers executor needs {error.name}: pip install -e '.[transformers]' in a checkout of shmring"
        ) from None


def find_model_type(model: str | None) -> str | None:
    """Returns what kind of model it is, as transformers names kinds; None: it can't be said before it is loaded.

    Args:
        model: a directory, or a name on the hub.

    Raises:
        ImportError: transformers is not installed.
    """
    if not model:
        return None
    try:
        return str(_load_config(import_transformers(), ModelSource.of(model)).model_type)
    except (OSError, ValueError):  # loading it says what is wrong
        return None


def load_checkpoint(model: str | None, settings: LoadSettings) -> Checkpoint:
    """Loads a model.

    Args:
        model: a directory, or a name on the hub.
        settings: how.

    Raises:
        ImportError: transformers, or a package that this model needs, is not installed.
        OSError: it is not there, or has no safetensors weights.
        ValueError: no model was named, or the model does not answer prompts, or it is incomplete.
    """
    if not model:
        raise ValueError("the transformers executor needs a model: a directory, or a name on the Hugging Face hub")
    place = ModelSource.of(model)
    if not place.is_local and model.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"there is no directory {model!r} to load a model from")
    transformers = import_transformers()
    try:
        return _load(transformers, place, settings)
    except ImportError as error:
        raise ImportError(f"model {model!r} needs a package that is not installed: {first_line(error)}") from error
    except OSError as error:
        raise OSError(f"can't load model {model!r}: {first_line(error)}") from error


def _load_config(transformers: Any, place: ModelSource) -> Any:
    return transformers.AutoConfig.from_pretrained(place.source, local_files_only=place.is_local, trust_remote_code=False)


def _load(transformers: Any, place: ModelSource, settings: LoadSettings) -> Checkpoint:
    transformers.utils.logging.disable_progress_bar()  # an engine's log is no terminal
    source, name = place.source, place.name
    common = {"local_files_only": place.is_local, "trust_remote_code": False}
    config = _load_config(transformers, place)
    is_multimodal = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_speech = config.model_type == SPEECH_MODEL
    answers = is_multimodal or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_speech and (not answers or config.is_encoder_decoder):
        raise ValueError(f"model {name!r} ({config.model_type}) is none that answers prompts token by token")
    processor = transformers.AutoProcessor.from_pretrained(source, **common) if is_multimodal or is_speech else None
    tokenizer = processor.tokenizer if processor is not None else transformers.AutoTokenizer.from_pretrained(source, **common)
    factory = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
    if is_speech:
        factory = transformers.AutoModelForSpeechSeq2Seq
    attention = {} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}
    model, report = factory.from_pretrained(
        source, dtype=settings.dtype, use_safetensors=True, output_loading_info=True, **attention, **common
    )
    _check_complete(name, report)
    return Checkpoint(
        name,
        model.to(_choose_device(settings.device)).eval(),
        tokenizer,
        processor,
        find_eos(model.generation_config, tokenizer),
        _choose_max_model_len(name, config, settings.max_model_len),
    )


def _check_complete(name: str, report: dict[str, Any]) -> None:
    for problem in ("missing_keys", "mismatched_keys"):
        weights = sorted(map(str, report.get(problem) or ()))
        if weights:
            shown = ", ".join(weights[:_MISSING_SHOWN])
            raise ValueError(f"model {name!r} is damaged or incomplete: {len(weights)} weights are {problem[:-5]}: {shown}")


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is asked for, and torch finds no CUDA device")
    return torch.device(device)


def find_eos(config: Any | None, tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that end an answer: by a model's configuration of generation, if it has one that says so, since chat
    models end with a token of their own; or by its tokenizer."""
    tokens = None if config is None else config.eos_token_id
    if tokens is None:
        tokens = tokenizer.eos_token_id
    if tokens is None:
        return frozenset()
    return frozenset([tokens] if isinstance(tokens, int) else tokens)


def _choose_max_model_len(name: str, config: Any, max_model_len: int | None) -> int:
    is_speech = config.model_type == SPEECH_MODEL
    place = "max_target_positions" if is_speech else "max_position_embeddings"
    limit: int | None = getattr(config if is_speech else config.get_text_config(), place, None)
    if limit is None:
        return max_model_len or _DEFAULT_MAX_MODEL_LEN
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(f"max_model_len {max_model_len} is more than the {limit} tokens that model {name!r} was made for")
    return max_model_len or limit
