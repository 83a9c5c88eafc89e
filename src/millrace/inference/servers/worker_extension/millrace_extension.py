"""What Millrace adds to vLLM's worker processes, by `--worker-extension-cls`.

It runs in vLLM's own environment, where Millrace is not installed, so it imports nothing of it.
"""

from typing import Any


class MillraceWorker:
    """Methods that /collective_rpc calls in each worker. vLLM adds them to its own class."""

    vllm_config: Any  # of vLLM's class, as the next four
    model_runner: Any
    reload_weights: Any
    list_loras: Any
    add_lora: Any

    def millrace_model(self) -> dict[str, Any]:
        """What must agree with the trainer."""
        config = self.vllm_config.model_config
        text = config.hf_text_config
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        return {
            "architectures": list(config.hf_config.architectures or ()),
            "sizes": {name: getattr(text, name, None) for name in names},
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
        }

    def millrace_load(self, folder: str) -> None:
        """Replace all weights by those of a Hugging Face directory, between two passes. vLLM's
        reload_weights() rebuilds what it derives from weights, such as packed matrices on a CPU and
        fused experts; its load_weights() does not, and fails half-way."""
        config = self.vllm_config.model_config
        path = config.model
        self.reload_weights(weights_path=folder)
        config.model = path  # the folder is removed soon
        self._millrace_tie_head()

    def millrace_unwrap_head(self) -> None:
        """Compute logits without the adapter, which has none for the head: vLLM applies one to the
        rows that it samples, and dies of prompt_logprobs, which have other rows."""
        modules = list(self.model_runner.get_model().modules())
        for module in modules:
            wrapper: Any = getattr(module, "logits_processor", None)
            if type(wrapper).__name__ == "LogitsProcessorWithLoRA":
                module.logits_processor = wrapper.base_layer

    def millrace_load_adapter(self, name: str, folder: str) -> None:
        """Replace the weights of the adapter that was added last by those of a PEFT directory."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        newest = max(self.list_loras())
        self.add_lora(
            LoRARequest(lora_name=name, lora_int_id=newest, lora_path=folder, load_inplace=True)
        )

    def _millrace_tie_head(self) -> None:
        """A head that shares the embedding's weights is not reloaded: pack it again."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        config = self.vllm_config.model_config
        if not getattr(config.hf_text_config, "tie_word_embeddings", False):
            return
        modules = list(self.model_runner.get_model().modules())
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        (embedding, *_) = (
            module
            for module in modules
            if isinstance(module, VocabParallelEmbedding) and module not in heads
        )
        for head in heads:
            if head.weight.data_ptr() != embedding.weight.data_ptr():
                head.weight.data.copy_(embedding.weight.data)
            head.quant_method.process_weights_after_loading(head)
