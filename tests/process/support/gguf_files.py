"""Writes a Llama folder as a GGUF file, with the package `gguf`."""

import json
import struct

import gguf
import numpy as np

LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(folder):
    """Yields (name, float32 numbers) for each tensor of a bf16 model."""
    with open(folder / "model.safetensors", "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(entry["shape"])


def stored_name(name):
    stem, leaf = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{leaf}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[module]}.{leaf}"


def neighbours(rows, heads):
    """Puts the two rows that RoPE rotates together next to each other."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def q4_k(values):
    """Blocks of Q4_K: the package only unpacks them. The least and the greatest of each 32
    numbers fit exactly, except that scales and minima are rounded to 6 bits."""
    groups = values.reshape(-1, 8, 32)
    minimum = np.maximum(-groups.min(-1), 0)
    scale = (groups.max(-1) + minimum) / 15
    d = (scale.max(-1) / 63).astype(np.float16)
    dmin = (minimum.max(-1) / 63).astype(np.float16)

    def sixths(numbers, unit):
        unit = np.where(unit == 0, 1, unit).astype(np.float32)[:, None]
        return np.clip(np.rint(numbers / unit), 0, 63).astype(np.uint8)

    sc, m = sixths(scale, d), sixths(minimum, dmin)
    step = d.astype(np.float32)[:, None] * sc
    low = dmin.astype(np.float32)[:, None] * m
    codes = (groups + low[..., None]) / np.where(step == 0, 1, step)[..., None]
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate([sc[:, :4] | sc[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6,
                             (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], -1)
    halves = np.stack([d, dmin], -1).view(np.uint8)
    blocks = np.concatenate([halves, packed, (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)], -1)
    return blocks.reshape(*values.shape[:-1], -1)


def quantized(values, kind):
    """Returns (bytes, type): the numbers in the type `kind`, or in Q8_0 if a row has no whole blocks of `kind`."""
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0:
        kind = gguf.GGMLQuantizationType.Q8_0
    if kind == gguf.GGMLQuantizationType.Q4_K:
        return q4_k(values), kind
    return gguf.quants.quantize(values, kind), kind


def write(folder, path, kind="BF16", norms="F32", **fields):
    """Matrices have the type `kind`, and norms the type `norms`. `fields` replaces fields of config.json."""
    config = json.loads((folder / "config.json").read_text()) | fields
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])

    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("dbrx")  # the pattern of models/tiny
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors(folder):
        module = name.split(".")[-2]
        if module in heads:
            values = neighbours(values, heads[module])
        chosen = gguf.GGMLQuantizationType[kind if values.ndim > 1 else norms]
        data, chosen = quantized(np.ascontiguousarray(values), chosen)
        writer.add_tensor(stored_name(name), data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
