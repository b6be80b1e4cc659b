#!/usr/bin/env python3
"""Writes a GGUF file of the Llama family as a Hugging Face folder, in bf16.

    pip install -r requirements.txt
    ./convert_gguf.py model.gguf FOLDER

config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json with the chat template, all from the fields of the file.
models/fetch runs it.
"""

import argparse
import json
import os
import pathlib
import sys

import gguf
import numpy as np

# {GGUF's name of a split: the pre-tokenizers that come before the byte level}
SPLITS = {"smollm": [{"type": "Digits", "individual_digits": True}]}
CONTROL = 3  # GGUF's type of a token that is no text

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def stored_name(name):
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight"""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TENSORS:
        return f"{TENSORS[parts[0]]}.{parts[1]}"
    raise SystemExit(f"convert_gguf: tensor {name} is none of the Llama family")


def halves(rows, heads):
    """Puts the rows of q and k into Hugging Face's order. In GGUF, two rows that
    RoPE rotates together are neighbours; here they are half a head apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def bf16(values):
    """The bits of the nearest bf16 numbers, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


class Source:
    """A GGUF file's fields and tensors."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        if self.field("general.architecture") != "llama":
            raise SystemExit("convert_gguf: want a model of the Llama family, "
                             f"have {self.field('general.architecture')}")
        self.heads = self.field("llama.attention.head_count")
        self.kv_heads = self.field("llama.attention.head_count_kv")

    def field(self, name):
        if name not in self.reader.fields:
            raise SystemExit(f"convert_gguf: the file does not say {name}")
        return self.reader.fields[name].contents()

    def tensor(self, tensor):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if ".attn_q." in tensor.name:
            return halves(values, self.heads)
        if ".attn_k." in tensor.name:
            return halves(values, self.kv_heads)
        return values


def config(source):
    hidden = source.field("llama.embedding_length")
    names = {tensor.name for tensor in source.reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": source.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.field("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // source.heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.field("llama.feed_forward_length"),
        "max_position_embeddings": source.field("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": source.heads,
        "num_hidden_layers": source.field("llama.block_count"),
        "num_key_value_heads": source.kv_heads,
        # The shortest decimal that rounds to the file's float32: 1e-05.
        "rms_norm_eps": float(str(np.float32(
            source.field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": source.field("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "bfloat16",
        "vocab_size": len(source.field("tokenizer.ggml.tokens")),
    }


def tokenizer(source):
    split = source.field("tokenizer.ggml.pre")
    if source.field("tokenizer.ggml.model") != "gpt2" or split not in SPLITS:
        raise SystemExit("convert_gguf: want a byte-level BPE with one of the splits "
                         f"{', '.join(SPLITS)}, have {split}")
    tokens = source.field("tokenizer.ggml.tokens")
    types = source.field("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False,
                  "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for token_id, token in enumerate(tokens) if types[token_id] == CONTROL],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [*SPLITS[split], byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: token_id for token_id, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in
                             source.field("tokenizer.ggml.merges")]},
    }


def tokenizer_config(source):
    tokens = source.field("tokenizer.ggml.tokens")
    named = {name: tokens[source.field(f"tokenizer.ggml.{key}_token_id")]
             for name, key in (("bos_token", "bos"), ("eos_token", "eos"),
                               ("unk_token", "unknown"), ("pad_token", "padding"))}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.field("llama.context_length"),
        "chat_template": source.field("tokenizer.chat_template"),
    }


def write_weights(source, path):
    tensors = source.reader.tensors
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        size = 2 * int(tensor.n_elements)
        header[stored_name(tensor.name)] = {
            "dtype": "BF16", "shape": [int(n) for n in reversed(tensor.shape)],
            "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, tensor in enumerate(tensors, 1):
            file.write(bf16(source.tensor(tensor)).tobytes())
            if sys.stderr.isatty():
                print(f"\rwriting tensors: {done} of {len(tensors)}", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        file.flush()
        os.fsync(file.fileno())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path, help="made; must not be there")
    flags = parser.parse_args()
    source = Source(flags.gguf)
    texts = {
        "config.json": config(source),
        "generation_config.json": {key: config(source)[key] for key in
                                   ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer.json": tokenizer(source),
        "tokenizer_config.json": tokenizer_config(source),
    }
    flags.folder.mkdir()
    for name, value in texts.items():
        text = json.dumps(value, indent=None if name == "tokenizer.json" else 2,
                          ensure_ascii=False)
        (flags.folder / name).write_text(text + "\n", encoding="utf-8")
    write_weights(source, flags.folder / "model.safetensors")


if __name__ == "__main__":
    main()
