"""Converts a Llama checkpoint (safetensors, bf16) to the GGUF file that llama.cpp reads."""

import json
import struct
import tempfile
from pathlib import Path

import numpy as np

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The accepted keys of config.json. READ has those that are written to the file or do not change
# outputs, ONE_VALUE those that must have the given value. All others are refused, because they
# could change outputs without anyone noticing.
READ = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim",
    "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "rms_norm_eps", "rope_theta", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_cache", "vocab_size",
}
ONE_VALUE = {"model_type": "llama", "hidden_act": "silu", "rope_scaling": None,
             "attention_bias": False, "mlp_bias": False}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def check_config(config: dict) -> None:
    """Raises ValueError for a model that this converter does not support."""
    for key, value in config.items():
        if key in ONE_VALUE:
            if value != ONE_VALUE[key]:
                raise ValueError(f"config.json: {key}: want {json.dumps(ONE_VALUE[key])}, have "
                                 f"{json.dumps(value)}: such models are not converted")
        elif key not in READ:
            raise ValueError(f"config.json: {key} is unknown, so the conversion could lose "
                             "what it sets")


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return WHOLE[stem] + ".weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def tensors(folder: Path):
    """Yields (name, float32 array) of one tensor at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size, = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{file}: {name} is {entry['dtype']}, want BF16")
            begin, end = entry["data_offsets"]
            bits = data[begin:end].view("<u2").astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(entry["shape"])


def interleave_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Changes the order of a head's rows. RoPE in llama.cpp rotates neighbouring rows together;
    RoPE of the checkpoint rotates rows that are half a head apart."""
    rows, columns = weight.shape
    return (weight.reshape(heads, 2, rows // heads // 2, columns)
            .swapaxes(1, 2).reshape(rows, columns))


def convert(folder: Path, out: Path, weights: str) -> None:
    """Writes the GGUF file. `weights` is the type of its matrices, f16 or bf16; both take two
    bytes per number as in the checkpoint."""
    import gguf
    kind = gguf.GGMLQuantizationType[weights.upper()]
    config = json.loads((folder / "config.json").read_text())
    check_config(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tempfile.tempdir = str(out.parent)  # the temporary file becomes as large as the result
    writer = gguf.GGUFWriter(out, "llama", use_temp_file=True)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
    for name, weight in tensors(folder):
        if ".q_proj." in name:
            weight = interleave_pairs(weight, heads)
        elif ".k_proj." in name:
            weight = interleave_pairs(weight, kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
