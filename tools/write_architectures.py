"""Write docs/reference/architectures.md: `python tools/write_architectures.py` (a minute)."""

import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from millrace.inference.embedded.self_test import DECODE_LOOP
from millrace.models.attention.packed import PACKED
from millrace.models.support import find_obstacle

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"
INTRODUCTION = """# Architectures

Millrace runs the model code of transformers with its own attention functions. Before an engine or
a trainer loads the weights of a model, it tests itself: a small copy of the model, with the same
kinds of layers and random weights, scores sequences of different lengths, some beyond the model's
attention window and all of its other length thresholds. Every logprob must agree to 1e-4 nats with
a plain forward pass of transformers over that sequence alone. A model that fails is refused with a
reason like those in the table. The test takes a fraction of a second on a CPU, once per process
and configuration.

The table holds for the default configuration of each architecture in transformers {version};
every checkpoint is tested when it is loaded. Models with LongRoPE (Phi-3-mini-128k,
Phi-3.5-mini, Phi-4-mini) use other rotary factors for all tokens of a sequence once it is longer
than `original_max_position_embeddings`. Tokens sampled before that point would then have other
logprobs, so Millrace limits the context of these models to that length, and says so at start unless
`engine.max_context` is set.

## GPT-OSS

Engines and trainer support attention sinks, alternating windows, the router and the experts on CPU
and GPU, with replayed routes and with LoRA, including LoRA of experts. Checkpoints with experts in
MXFP4 are loaded as plain weights, in the dtype of the engine or trainer, and are saved as such:
2 bytes per weight in bfloat16. On a GPU, layers whose window is shorter than the sequences that
share a prompt train without the flash kernel, as those of Gemma do.

On a GPU an engine decodes models with sinks in single steps by default, with a warning. On an H200,
4 layers in the shape of gpt-oss-20b generated 1,026 tokens/s for 64 sequences in single steps and
5,793 with the decode loop (`engine.options.decode_steps = 32`, `compile = false`). The kernels of
the loop agree with a float64 reference, but the whole loop with sinks was compared with
transformers in bfloat16 only, where random experts differ by up to 1.3 nats (0.7 in single steps).

## Llama 4

Engines and trainer compute a token by the experts that its router chooses, as in other mixtures;
transformers multiplies every token by every expert of a layer. Routes are replayed. `[lora]` cannot
adapt the experts, because PEFT reads their weights, which have the shape [experts, input, output],
as [experts, output, input]; name other layers in `lora.target_modules`.

Layers with rotary embeddings attend within chunks of 8,192 tokens, and the others scale queries by
their positions. The trainer packs the parts of a sequence in each chunk as sequences of their own.

None of this has been run on a GPU yet: experts by PyTorch's grouped products (the engine's kernels
for few rows do not support their layout) and the decode kernel with chunks, which is tested by
Triton's interpreter. An engine on a GPU does not use the flash kernel for prompts beyond the first
chunk, with a warning. Exact mode computes the same floats on a CPU, and is refused on a GPU.

## Layers with a recurrent state

Gated delta nets (Qwen3-Next, Qwen3.5), Mamba layers (Falcon-H1, Granite 4, Nemotron-H) and short
convolutions (LFM2) keep a sequence as a state of fixed size. Millrace runs the code of transformers
for them, on whole sequences. There is one difference: in Nemotron-H, transformers raises time steps
to `time_step_min` in forward passes but not in decode steps; Millrace applies `time_step_limit` of
the configuration in both.

- An engine keeps one state per sequence, `engine.max_sequences` of them, within
  `engine.options.kv_bytes`. Completions of one prompt fork its state. With `engine.kv = "keep"` a
  state stays across a swap, as KV does.
- A state cannot go back to an earlier token, so an engine also keeps snapshots of states, each at
  the end of a KV block: at the last whole block of a prompt, at the newest one of each running
  sequence, and where a prompt branches off from an earlier one. There are at most
  2 · `engine.max_sequences` snapshots, in at most a quarter of `kv_bytes`; the least recently used
  goes first. A request reuses the longest prefix that has both KV and a snapshot. So a repeated
  prompt, the next turn of a conversation and a preempted sequence compute less than one block
  again. A common system prompt is reused from the third prompt on: the second shows where they
  branch.
- Layers of the first Mamba (Mamba, Falcon-Mamba, Jamba) continue a state token by token, because
  those of transformers do so with one token only. The part of a prompt after a snapshot or a chunk
  of prefill (`engine.options.prefill_tokens`) is therefore slow there.
- On a GPU these models decode in single steps, without the decode loop, with a warning.
  transformers uses faster kernels for these layers if flash-linear-attention, causal-conv1d or
  mamba-ssm is installed.
- The trainer computes shared prefixes once, except in these layers, which compute them for every
  completion. `trainer.mesh.cp` must be 1.
- LoRA adapts these layers too; their adapters are merged (`lora.apply = "merged"`), never applied
  unmerged.
- `fidelity.mode = "exact"` refuses these models.

`tests/training/test_named_architectures.py` compares small copies of Qwen3-Next, Qwen3.5,
Falcon-H1, Nemotron-H, Granite 4, LFM2, GPT-OSS, Llama 4, Phi-3.5-MoE and DeepSeek-V2 (with groups
of experts) with plain transformers: logprobs, greedy tokens, swaps, preemption, cached prefixes,
the packed gradient of every parameter and LoRA, on a CPU in float32. Engines cache the keys and
values of DeepSeek-V2 and -V3 expanded, for every head, not in the compressed form of transformers.

## Not supported

- DeepSeek-V3.2, GLM-5 and others with an indexer: which tokens attention sees depends on a top-k
  over all tokens, and engine and trainer may decide near-ties differently. The choice would have to
  be recorded and replayed for every token and layer.

## All architectures

`python tools/write_architectures.py` writes this page.

| model type | class | supported | reason |
|---|---|---|---|
"""
_GROUPS = {"n_shared_experts": 2, "n_group": 1, "topk_group": 1}
# Settings of checkpoints where the defaults of an architecture are no model, or one of several.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {"n_routed_experts": 64, "num_experts_per_tok": 6, **_GROUPS}),
    "dots1": ("dots1", {"n_routed_experts": 128, "num_experts_per_tok": 6, **_GROUPS}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "lfm2_moe",
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    ),
    "phi3 (LongRoPE)": (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.01 * i for i in range(48)],
                "long_factor": [1.0 + 0.5 * i for i in range(48)],
            },
        },
    ),
    "phimoe (window)": ("phimoe", {"sliding_window": 2048, "max_position_embeddings": 4096}),
}


def page() -> str:
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS}
    introduction = INTRODUCTION.format(version=transformers.__version__)
    return introduction + "".join(row(name) for name in sorted(names))


def row(name: str) -> str:
    """A line of the table."""
    model_type, _ = VARIANTS.get(name, (name, {}))
    obstacle = obstacle_of(name)
    # Differences depend on the machine.
    verdict = "no | " + re.sub(r" by \S+ nats", "", obstacle) if obstacle else "yes |"
    return f"| `{name}` | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]} | {verdict} |\n"


def obstacle_of(name: str) -> str | None:
    """Why engine or trainer refuse a model; None if they compute it as transformers does."""
    try:
        config = config_of(name)
    except StrictDataclassError:
        return "its default configuration is not valid in transformers"
    found = (find_obstacle(config, attention=path) for path in (PACKED, DECODE_LOOP))
    return next((obstacle for obstacle, _ in filter(None, found)), None)


def config_of(name: str) -> PreTrainedConfig:
    model_type, settings = VARIANTS.get(name, (name, {}))
    return CONFIG_MAPPING[model_type](**settings)


if __name__ == "__main__":
    PAGE.write_text(page())
