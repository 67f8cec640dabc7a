"""Llama (Touvron et al. 2023), and what has its shape: Mistral without a window, Qwen2 with its biases."""

from typing import ClassVar

from torch import Tensor, nn

from headrace_shard.checkpoint.config import ModelConfig
from headrace_shard.inputs import ForwardInputs
from headrace_shard.kernels.blocks import BlockTensors, DecoderBlocks
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kv_cache import KVCache
from headrace_shard.layers.attention import Attention
from headrace_shard.layers.embedding import Embedding, output_layer
from headrace_shard.layers.mlp import GatedMLP
from headrace_shard.layers.native import NativeLayer
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

    def tensors(self) -> BlockTensors | None:
        """What the kernels need to run the whole block; None while a part of it computes in torch."""
        attention, mlp = self.self_attn, self.mlp
        qkv, output = attention.qkv_proj.packed, attention.o_proj.packed
        gate_up, down = mlp.gate_up_proj.packed, mlp.down_proj.packed
        if qkv is None or output is None or gate_up is None or not gate_up.is_gated or down is None:
            return None
        return BlockTensors(
            attention_norm=self.input_layernorm.weight.data,
            qkv=qkv,
            output=output,
            mlp_norm=self.post_attention_layernorm.weight.data,
            gate_up=gate_up,
            down=down,
            key_cache=attention.key_cache,
            value_cache=attention.value_cache,
        )


class LlamaModel(NativeLayer):
    """Everything below the output layer."""

    _kernels: DenseKernels | None = None
    whole: DecoderBlocks | None = None
    """All of `layers` in one call, where kernels run them whole; else they are called one by one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def use(self, kernels: DenseKernels) -> None:
        """Run the blocks with `kernels` once they have a cache."""
        self._kernels = kernels

    def join_blocks(self) -> None:
        """Make one call of the blocks, if kernels run them whole; to be done anew for each cache."""
        self.whole = None
        layers = [layer for layer in self.layers if isinstance(layer, LlamaBlock)]
        blocks = [tensors for layer in layers if (tensors := layer.tensors()) is not None]
        if self._kernels is not None and len(blocks) == len(layers):
            self.whole = DecoderBlocks(
                self._kernels,
                blocks,
                head_dim=layers[0].self_attn.head_dim,
                epsilon=layers[0].input_layernorm.eps,
                scale=layers[0].self_attn.scale,
            )

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states [T, hidden_size]."""
        hidden = self.embed_tokens(inputs.token_ids)
        rotation = self.rotary(inputs.positions)
        if self.whole is not None:
            hidden = self.whole.run(hidden, rotation.cos, rotation.sin, inputs)
        else:
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

    def bind_cache(self, cache: KVCache) -> None:
        """Use this cache from now on."""
        super().bind_cache(cache)
        self.model.join_blocks()

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm."""
        hidden: Tensor = self.model(inputs)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
