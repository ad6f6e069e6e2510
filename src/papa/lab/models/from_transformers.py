"""Causal language models of the `transformers` library, with random weights or from local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from papa.errors import ConfigError, did_you_mean
from papa.packages import require

PREFIX = "transformers:"
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop")
"""The names that the configs of models have for dropout."""


class CausalModel(nn.Module):
    """A causal model of `transformers` that takes tokens and returns `vocab_size` logits, as `GPT` does."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.model, self.vocab_size = model, vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits[..., : self.vocab_size]


def make_causal_model(
    name: str,
    *,
    vocab_size: int,
    context: int,
    num_layers: int,
    num_heads: int,
    width: int,
    dropout: float = 0.0,
    pretrained: bool = False,
) -> CausalModel:
    """Build a causal model.

    Its name is `transformers:TYPE` for a type of model such as gpt2 or llama, of the given size; or `transformers:PATH`
    for a local folder with a `config.json`, whose size counts, and whose weights are loaded with `pretrained`. Keys and
    values have as many heads as queries, and the hidden layers of blocks are four times as wide as a token's vector.
    """
    require("transformers")
    import transformers

    library: Any = transformers
    chosen = name.removeprefix(PREFIX)
    folder = Path(chosen) if (Path(chosen) / "config.json").is_file() else None
    if pretrained and folder is None:
        raise ConfigError(f"{name} is not a local folder with a config.json, expected one to load weights from")
    config: Any = library.AutoConfig.from_pretrained(chosen, local_files_only=True) if folder else None
    if config is None:
        sizes = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
        sizes |= {"num_key_value_heads": num_heads, "head_dim": width // num_heads, "intermediate_size": 4 * width}
        config = _config_of_type(chosen, vocab_size=vocab_size, max_position_embeddings=context, **sizes)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, token, None)  # their defaults are beyond a small vocabulary
        for option in DROPOUTS:
            if hasattr(config, option):
                setattr(config, option, dropout)
    if config.vocab_size < vocab_size:
        raise ConfigError(f"{name} has {config.vocab_size} tokens, expected at least the {vocab_size} of the tokenizer")
    auto = library.AutoModelForCausalLM
    model = auto.from_pretrained(chosen, local_files_only=True) if pretrained else auto.from_config(config)
    return CausalModel(model.float(), vocab_size)


def _config_of_type(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ConfigError(f"{PREFIX}{kind} is neither a local folder nor a causal model: {did_you_mean(kind, known)}")
    return AutoConfig.for_model(kind, **options)
