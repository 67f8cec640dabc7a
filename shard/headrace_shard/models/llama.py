"""Llama (Touvron et al. 2023), and what has its shape: Mistral without a window, Qwen2 with its biases."""

from typing import ClassVar

from torch import Tensor, nn

from headrace_shard.checkpoint.config import ModelConfig
from headrace_shard.inputs import ForwardInputs
from headrace_shard.layers.attention import Attention
from headrace_shard.layers.embedding import Embedding, output_layer
from headrace_shard.layers.mlp import GatedMLP
from headrace_shard.layers.norm import RMSNorm
from headrace_shard.layers.rotary import RotaryEmbedding, Rotation
from headrace_shard.models.base import CausalLM


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            has_qkv_bias=config.attention_bias,
            has_output_bias=config.attention_output_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, has_bias=config.mlp_bias)

    def forward(self, hidden: Tensor, rotation: Rotation, inputs: ForwardInputs) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        hidden = self.self_attn(self.input_layernorm(hidden), rotation, inputs, hidden)
        output: Tensor = self.mlp(self.post_attention_layernorm(hidden), hidden)
        return output


class LlamaModel(nn.Module):
    """Everything below the output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states [T, hidden_size]."""
        hidden = self.embed_tokens(inputs.token_ids)
        rotation = self.rotary(inputs.positions)
        for layer in self.layers:
            hidden = layer(hidden, rotation, inputs)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(CausalLM):
    """The whole network, with names of modules as checkpoints have them."""

    packed_modules: ClassVar[dict[str, tuple[str, int]]] = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = output_layer(config.vocab_size, config.hidden_size, tied_to)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm."""
        hidden: Tensor = self.model(inputs)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
