"""A GGUF file's weights as Hugging Face has them: the reference for what the package reads in its own order."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from stretto.models.gguf import GGUFFile, config_from_gguf, dequantize, hf_name


def iter_weights(gguf: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, float32 tensor) for every weight, in file order.

    llama.cpp stores the rows of each q and k head of the llama architecture with its two halves interleaved; here they
    are put back.
    """
    config = config_from_gguf(gguf)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for tensor in gguf.tensors.values():
        name = hf_name(tensor.name)
        if name is None:
            continue
        values = dequantize(tensor)
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            values = values.view(heads[part], -1, 2, values[0].numel()).transpose(1, 2).reshape(values.shape)
        yield name, values
