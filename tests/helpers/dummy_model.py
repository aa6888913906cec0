"""A model directory without weights, for tests of what stands around the engine: config, tokenizer, chat template.

With load_format="dummy" it answers at about a thousand tokens a second. Its vocabulary mixes words, single characters
and single bytes, so that its answers hold words as well as broken and complete UTF-8.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 400
CONTEXT = 32768
EOS_ID = 1
_CORPUS = ["the quick brown fox jumps over the lazy dog", "été, où ça? 日本語 наш мир", "a fugue enters before it ends"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_dummy_model(directory: Path, *, endless: bool = False) -> Path:
    """Write the model there; returns the directory. `endless`: no token ends its answers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
    }
    tokenizer_config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": _CHAT_TEMPLATE}
    if endless:
        del config["eos_token_id"], tokenizer_config["eos_token"]
    (directory / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer
